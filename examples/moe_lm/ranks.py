"""Starting a run with its framework's own launcher, following it, and ending it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

__all__ = [
    "RunFailed",
    "launched_platform",
    "end_with_launcher",
    "ended_in_order",
    "keep_to_one_core",
    "start_and_follow",
]

SECONDS_WITHOUT_A_STEP = 120
SECONDS_TO_SHUT_DOWN = 30
SECONDS_TO_END = 5


class RunFailed(Exception):
    """A rank failed or hangs; the message quotes the log."""


def launched_platform():
    """The framework whose launcher started this process, or None."""
    if "MS_ROLE" in os.environ:
        return "mindspore"
    return "torch" if "TORCHELASTIC_RUN_ID" in os.environ else None


def end_with_launcher():
    """End this process once its parent is gone: both launchers put ranks in sessions of their own, out of reach."""
    launcher = os.getppid()

    def watch():
        while os.getppid() == launcher:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def ended_in_order(work):
    """The exit code of ``work()``, which starts runs, or of its end by an error of theirs or by a signal."""
    # So that a run is ended in order, too, when this process is asked to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return work()
    except RunFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def keep_to_one_core(run):
    """Give each MindSpore rank one core where ranks outnumber cores: its threads wait for one another by spinning, and
    so would take the cores from other ranks."""
    rank = os.environ.get("RANK_ID")
    if rank is None or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if run.num_ranks > len(cores):
        os.sched_setaffinity(0, {cores[int(rank) % len(cores)]})


def start_and_follow(run, script, folder):
    """Start the processes of a run, and yield its records as they appear.

    Args:
        script: the training script and its arguments.
        folder: for the records, ``<run>.jsonl``, and what the processes print, ``<run>.log``.

    Raises:
        RunFailed: a process failed, or no step was made for a long time. Whatever happens, all processes are ended.
            A run with its last record is complete: what the frameworks do while they shut down is not its failure.
    """
    records, log = folder / f"{run.name}.jsonl", folder / f"{run.name}.log"
    records.unlink(missing_ok=True)
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*_launcher(run, folder), *script],
            env=_environment(run),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield from _follow(process, records, f"{run.title}: ", log)
    finally:
        _end(process)


def _launcher(run, folder):
    if run.one_device:
        return [sys.executable]
    if run.platform == "torch":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.num_ranks}"]
    return [
        sys.executable,
        "-m",
        "mindspore.parallel.cluster.run",  # msrun
        f"--worker_num={run.num_ranks}",
        f"--local_worker_num={run.num_ranks}",
        "--join=True",
        f"--master_port={_free_port()}",
        f"--log_dir={folder / run.name}",
    ]


def _environment(run):
    environment = dict(os.environ)
    # msrun starts the "python" that it finds.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    # One thread each, also on one device: threads that wait for one another crawl where cores are scarce.
    environment["OMP_NUM_THREADS"] = "1"
    if run.platform == "mindspore":
        environment.setdefault("GLOG_v", "4")
        # Ranks look for the scheduler, and for each other, every second.
        environment |= {"MS_RETRY_INTERVAL_LOWER": "1", "MS_RETRY_INTERVAL_UPPER": "1"}
    return environment


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _follow(process, path, title, log):
    """Yield the records in a file that grows, until the process has ended."""
    position, last_news, complete = 0, time.monotonic(), False
    while True:
        ended = process.poll() is not None
        if path.exists():
            with open(path, encoding="utf-8") as file:
                file.seek(position)
                text = file.read()
            lines = text[: text.rfind("\n") + 1]
            position += len(lines)  # the records are ASCII
            for line in lines.splitlines():
                last_news = time.monotonic()
                record = json.loads(line)
                complete = record.get("last", False)
                yield record
        if ended or (complete and time.monotonic() - last_news > SECONDS_TO_SHUT_DOWN):
            break
        if time.monotonic() - last_news > SECONDS_WITHOUT_A_STEP:
            raise RunFailed(f"{title}no step for {SECONDS_WITHOUT_A_STEP} s\n{_quote(log)}")
        time.sleep(0.1)
    if not complete:
        raise RunFailed(f"{title}ended with exit code {process.returncode}\n{_quote(log)}")


def _quote(log, num_lines=40):
    """The log from its first traceback on, or its end."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    first = next((i for i, line in enumerate(lines) if "Traceback" in line), max(0, len(lines) - num_lines))
    return "\n".join([f"from {log}:", *lines[first : first + num_lines]])


def _end(process):
    if process.poll() is None:
        process.send_signal(signal.SIGINT)  # both launchers end their ranks on it
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
