"""A process that has imported a framework and forks ranks, which so start without the seconds of that import.

    zygote = Zygote.of("torch")
    child = zygote.fork(["torch", "rank"], environment, channel, log)    # serves like a subprocess.Popen

A zygote runs nothing of its framework but the import, which leaves no threads that a fork would lose. The ranks are its
children; on Linux they end when it does, and it ends with the thread that first asked for it.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import random
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_MOST_BYTES = 1 << 20  # of one request, which holds an environment
_IMPORT_LIMIT_S = 120
_IMPORTED = {
    # What the first optimizer, DTensor and checkpoint of a rank would import.
    "torch": ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor.parallel", "hyper_parallel"),
    "mindspore": ("mindspore", "hyper_parallel"),
}
_of_thread = threading.local()


class Zygote:
    """The parent's end."""

    def __init__(self, platform: str):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.harness.zygote", platform, str(theirs.fileno())],
                cwd=ROOT,
                env=dict(os.environ, OMP_NUM_THREADS="1", GLOG_v="4"),  # both are read by the import
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )
        atexit.register(self._close)

    @classmethod
    def of(cls, platform: str) -> Zygote:
        """The one of this thread and of where modules are found now; started when there is none, or none any more."""
        zygotes = _of_thread.__dict__
        key = f"{platform} {os.environ.get('PYTHONPATH')}"
        if key not in zygotes or zygotes[key]._process.poll() is not None:
            zygotes[key] = cls(platform)
        return zygotes[key]

    def fork(self, arguments: list[str], environment: dict[str, str], channel: int, log: int) -> ForkedProcess:
        """Start a process, the leader of a group of its own, that does what ``python -m tests.harness.worker`` does."""
        return ForkedProcess(self, self.ask(("fork", arguments, environment), _IMPORT_LIMIT_S, (channel, log)))

    def ask(self, request: tuple, limit_s: float, descriptors: tuple[int, ...] = ()) -> int:
        """One request, one number; a zygote that does not answer in time is given up, and its ranks with it."""
        try:
            self._socket.settimeout(limit_s)
            socket.send_fds(self._socket, [pickle.dumps(request)], descriptors)
            return pickle.loads(self._socket.recv(_MOST_BYTES))
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        atexit.unregister(self._close)
        self._socket.close()
        self._process.kill()
        self._process.wait(timeout=30)


class ForkedProcess:
    """As much of ``subprocess.Popen`` as a pool needs."""

    def __init__(self, zygote: Zygote, pid: int):
        self.pid, self._zygote = pid, zygote
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int:
        """Collect a process that has ended or is ending: until it has, the zygote does nothing else."""
        if self.returncode is None:
            self.returncode = self._zygote.ask(("wait", self.pid), timeout)
        return self.returncode


def main(platform: str, descriptor: str) -> None:
    """Answer requests until the parent closes its end."""
    from tests.harness import worker

    worker.end_with_parent()
    try:
        for name in _IMPORTED[platform]:
            importlib.import_module(name)
    except Exception:
        pass  # Every rank meets it again, and says so.
    with socket.socket(fileno=int(descriptor)) as channel:
        while True:
            request, descriptors, *_ = socket.recv_fds(channel, _MOST_BYTES, 2)
            if not request:
                return
            verb, *arguments = pickle.loads(request)
            if verb == "wait":
                answer = os.waitstatus_to_exitcode(os.waitpid(*arguments, 0)[1])
            else:
                answer = os.fork()
                if answer == 0:
                    channel.close()
                    _become_rank(worker.main, *arguments, *descriptors)
                os.setpgid(answer, answer)  # here too, so that it is done when the parent hears of the process
                for each in descriptors:
                    os.close(each)
            channel.send(pickle.dumps(answer))


def _become_rank(run, arguments: list[str], environment: dict[str, str], channel: int, log: int) -> None:
    """Does not return."""
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.clear()
        os.environ.update(environment)
        _forget_common_randomness()
        run(*arguments, str(channel))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _forget_common_randomness() -> None:
    """Ranks that draw without a seed draw different values, as processes that were started one by one do."""
    import numpy

    random.seed()
    numpy.random.seed()


if __name__ == "__main__":
    main(*sys.argv[1:])
