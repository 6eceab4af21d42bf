"""Rank processes that are started once and serve many cases.

    with RankPool("torch", 4) as pool:
        per_rank = pool.run(case, rows=8)       # case(rank_context, rows=8) on every rank, one result per rank

A case is a top-level function of an importable module, or its name (see by_name.py); arguments and results are plain
values that pickle (numpy arrays, numbers, dicts). A case that fails on any rank may leave the process group out of
step, so the pool then ends its processes, and the next `run` starts new ones. A case that expects an error is therefore
cheaper if it catches the error itself. A pool belongs to the thread that runs its cases: on Linux the ranks end when
that thread does.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.harness.zygote import ROOT, ForkedProcess, Zygote

# After the first rank has failed the others often wait for it in a collective, and will not answer in time either.
GRACE_AFTER_FAILURE_S = 5.0
LOG_TAIL_CHARACTERS = 3000


class RankFailure(AssertionError):
    """A case failed on some rank; the message says where and why."""


@dataclass(frozen=True)
class RankContext:
    """What a case learns about the rank it runs on; `platform` is the library's name of it, `framework` the adapter of
    tests/harness/frameworks.py."""

    platform: str
    rank: int
    world_size: int
    framework: Any


@dataclass(frozen=True)
class RankError:
    """What a rank left instead of a value: the exception it raised, or its exit code `died`, negative for a signal."""

    error: str = ""
    message: str = ""
    traceback: str = ""
    died: int | None = None


_CHANNEL_CLOSED = RankError(message="closed its channel")


@dataclass
class _Process:
    """One child, leader of a process group of its own, with the channel to it and the log of what it prints."""

    handle: subprocess.Popen | ForkedProcess
    connection: Connection
    log: Path
    log_start: int = 0

    def log_tail(self) -> str:
        """What was printed since `log_start`, the last part of it."""
        with open(self.log, "rb") as stream:
            stream.seek(self.log_start)
            return stream.read().decode(errors="replace")[-LOG_TAIL_CHARACTERS:].strip()

    def kill(self) -> None:
        """Kill the process and its children. Only `reap` collects it, so until then its id is certainly its own."""
        if self.handle.returncode is None:
            os.killpg(self.handle.pid, signal.SIGKILL)

    def reap(self) -> None:
        self.handle.wait(timeout=30)
        self.connection.close()


class RankPool:
    """`world_size` ranks of one platform, started by the first `run`: "torch" (gloo), "torch_npu" (hccl) or "mindspore"
    (its CPU backend). They have joined each other, or find what they need to do so in their environment."""

    def __init__(
        self,
        platform: str,
        world_size: int,
        start_limit_s: float = 120,
        collective_limit_s: int = 30,
        joined: bool = True,
    ):
        self.platform = platform
        self.world_size = world_size
        self._start_limit_s = start_limit_s
        self._collective_limit_s = collective_limit_s
        self._role = "rank" if joined else "rank alone"
        self._ranks: list[_Process] = []
        self._scheduler: _Process | None = None
        self._logs = Path(tempfile.mkdtemp(prefix="rank_pool_"))
        atexit.register(self.close)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """The processes alive now, the scheduler of MindSpore included."""
        return [process.handle.pid for process in self._processes()]

    def run(self, case: Callable | str, /, time_limit_s: float = 60, collect: bool = False, **kwargs: Any) -> list:
        """Call `case(rank_context, **kwargs)` on every rank and return the results, one per rank.

        A rank that raises or dies makes `run` raise `RankFailure`. With `collect` its place in the list holds a
        `RankError` instead, for cases in which a rank dies or stays away on purpose. A rank without an answer in time
        is a `RankFailure` always.
        """
        name = _name_of(case)
        try:
            if not self._ranks:
                self._start()
            for process in self._ranks:
                process.log_start = process.log.stat().st_size
                try:
                    process.connection.send((name, kwargs))
                except OSError:
                    pass  # It is dead, and reading from it will say so.
            return self._answers(name, time_limit_s, collect)
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """End every process and remove the logs; the pool may not be used afterwards."""
        self._end()
        shutil.rmtree(self._logs, ignore_errors=True)
        atexit.unregister(self.close)

    def _start(self) -> None:
        port, size, limit = str(free_port()), str(self.world_size), str(self._collective_limit_s)
        common = dict(os.environ, OMP_NUM_THREADS="1")
        if self.platform != "mindspore":
            common.update(
                WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK_POOL_COLLECTIVE_LIMIT_S=limit
            )
        else:
            common.update(
                MS_WORKER_NUM=size,
                RANK_SIZE=size,
                MS_SCHED_HOST="127.0.0.1",
                MS_SCHED_PORT=port,
                MS_CPU_COMM_OP_TIMEOUT=limit,
                GLOG_v="4",  # errors only
                MS_RETRY_INTERVAL_LOWER="1",
                MS_RETRY_INTERVAL_UPPER="1",
            )  # seconds; more makes the start slower
            self._scheduler = self._spawn("scheduler", dict(common, MS_ROLE="MS_SCHED", RANK_ID="0"))
        for rank in range(self.world_size):
            number = str(rank)
            own = (
                {"RANK": number}
                if self.platform != "mindspore"
                else {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": number, "RANK_ID": number, "DEVICE_ID": number}
            )
            self._ranks.append(self._spawn(f"rank{rank}", {**common, **own}))
        self._answers("starting", self._start_limit_s, collect=False)

    def _spawn(self, name: str, environment: dict[str, str]) -> _Process:
        ours, theirs = multiprocessing.Pipe()
        log = self._logs / f"{name}.log"
        with theirs, open(log, "wb") as stream:
            arguments = [self.platform, "scheduler" if name == "scheduler" else self._role]
            channel = theirs.fileno()
            if self.platform != "torch_npu":
                handle = Zygote.of(self.platform).fork(arguments, environment, channel, stream.fileno())
            else:  # Its import starts threads.
                handle = subprocess.Popen(
                    [sys.executable, "-u", "-m", "tests.harness.worker", *arguments, str(channel)],
                    cwd=ROOT,
                    env=environment,
                    pass_fds=[channel],
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                )
        return _Process(handle, ours, log)

    def _answers(self, what: str, time_limit_s: float, collect: bool) -> list:
        """One answer per rank; ends the processes if any rank failed."""
        began = time.monotonic()
        answers = self._listen(began + time_limit_s, patient=collect)
        silent = [rank for rank in range(self.world_size) if rank not in answers]
        if not silent and not any(isinstance(answer, RankError) for answer in answers.values()):
            return [answers[rank] for rank in range(self.world_size)]
        waited_s = time.monotonic() - began
        self._print_stacks(silent)
        ranks = self._ranks
        self._end()
        for rank, answer in answers.items():
            if answer is _CHANNEL_CLOSED:
                answers[rank] = _death(ranks[rank].handle.returncode)
        if collect and not silent:
            return [answers[rank] for rank in range(self.world_size)]
        answers.update({rank: RankError(message=f"had not answered after {waited_s:.1f} s") for rank in silent})
        failed = {rank: answer for rank, answer in sorted(answers.items()) if isinstance(answer, RankError)}
        raise RankFailure(
            _report(
                f"{what} failed on {_ranks_text(failed)} of {self.world_size} ({self.platform})",
                failed,
                {rank: ranks[rank].log_tail() for rank in failed},
            )
        )

    def _listen(self, deadline: float, patient: bool) -> dict[int, Any]:
        """The answers that arrive before the deadline; not `patient` brings it forward once a rank has failed."""
        answers: dict[int, Any] = {}
        waiting = {process.connection: rank for rank, process in enumerate(self._ranks)}
        while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, OSError):
                    answers[rank] = _CHANNEL_CLOSED
                if isinstance(answers[rank], RankError) and not patient:
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE_S)
        return answers

    def _print_stacks(self, silent: list[int]) -> None:
        """Have silent ranks write their stacks to their logs, which shows what they wait for."""
        for rank in silent:
            os.kill(self._ranks[rank].handle.pid, signal.SIGUSR1)
        if silent:
            time.sleep(0.5)

    def _processes(self) -> list[_Process]:
        return self._ranks + ([self._scheduler] if self._scheduler else [])

    def _end(self) -> None:
        for process in self._processes():
            process.kill()
        for process in self._processes():
            process.reap()
        self._ranks, self._scheduler = [], None


def _name_of(case: Callable | str) -> str:
    """ "module:function", after checking that a rank will find the same function under it."""
    if isinstance(case, str):
        return case
    name = f"{case.__module__}:{case.__qualname__}"
    if getattr(sys.modules[case.__module__], case.__qualname__, None) is not case:
        raise ValueError(f"a case must be a top-level function of an importable module, got {name}")
    return name


def free_port() -> int:
    """A port nobody listens on, outside the range from which systems pick ports for outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def _death(exit_code: int) -> RankError:
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"
    return RankError(message=how, died=exit_code)


def _report(title: str, failed: dict[int, RankError], logs: dict[int, str]) -> str:
    """What happened on the failed ranks and the ends of their logs; equal texts are shown once, for all their ranks."""
    stories = {
        rank: f"raised\n{error.traceback.rstrip()}" if error.error else error.message for rank, error in failed.items()
    }
    tails = {rank: f"printed last\n{log}" for rank, log in logs.items() if log}
    return "\n".join([title, *_grouped(stories), *_grouped(tails)])


def _grouped(texts: dict[int, str]) -> list[str]:
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    return [f"--- {_ranks_text(ranks)} {text}" for text, ranks in ranks_of.items()]


def _ranks_text(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"{'ranks' if len(numbers) > 1 else 'rank'} {','.join(numbers)}"
