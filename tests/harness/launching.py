"""Running the launchers of platform/ as a user does, on one host or on several that are all this one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.harness.pool import free_port

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 200


def launch(platform, num_ranks, arguments, folder, num_hosts=1):
    """Run ``platform/<platform>/launch.sh num_ranks *arguments`` once per host.

    Returns:
        exit code and everything printed, per host; where the code is not 0, with what the ranks wrote to logs of their
        own. Whatever was started is gone.
    """
    port = str(free_port())
    elsewhere = _python_elsewhere(folder)
    started = []
    for host in range(num_hosts):
        home = folder / f"host{host}"
        home.mkdir()
        several = {"NNODES": str(num_hosts), "NODE_RANK": str(host), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = dict(os.environ, PYTHON=sys.executable, PYTHONPATH=paths, TMPDIR=str(home))
        environment.update(LOG_DIR=str(home / "log"), **(several if num_hosts > 1 else {}))
        if host:
            environment.update(PYTHON=str(elsewhere))
        output = open(home / "output", "wb")
        command = [ROOT / "platform" / platform / "launch.sh", str(num_ranks), *arguments]
        launcher = subprocess.Popen(
            command,
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        output.close()
        started.append((launcher, home / "output"))
    ends = [(_ended(launcher), path) for launcher, path in started]
    return [(code, _text(path) + (_rank_logs(path.parent / "log") if code else "")) for code, path in ends]


def _text(path):
    return path.read_text(encoding="utf-8", errors="replace")


def _rank_logs(folder):
    """MindSpore's launcher shows what rank 0 printed; that another rank failed, and why, stands in its log only."""
    return "".join(f"\n--- {path.name}\n{_text(path)[-1500:]}" for path in sorted(folder.glob("worker_*.log")))


def _python_elsewhere(folder):
    """An interpreter for hosts that do not have MASTER_ADDR: msrun starts its scheduler on every host that has it, and
    here all of them would."""
    program = (
        "import runpy; from mindspore.parallel.cluster.process_entity import _api; "
        "_api._is_local_ip = lambda address: False; "
        "runpy.run_module('mindspore.parallel.cluster.run', run_name='__main__', alter_sys=True)"
    )
    python = folder / "elsewhere" / "python"
    python.parent.mkdir()
    lines = [
        "#!/usr/bin/env bash",
        'if [[ "$1 $2" == "-m mindspore.parallel.cluster.run" ]]; then',
        f'    exec {sys.executable} -c "{program}" "${{@:3}}"',
        "fi",
        f'exec {sys.executable} "$@"',
    ]
    python.write_text("\n".join(lines) + "\n", encoding="utf-8")
    python.chmod(0o755)
    return python


def _ended(launcher):
    """The exit code, or words if there was none in time."""
    try:
        return launcher.wait(timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        # Ranks live in sessions of their own; their launcher ends them when it is asked to end.
        launcher.terminate()
        try:
            launcher.wait(timeout=15)
        except subprocess.TimeoutExpired:
            pass
        return f"none after {TIME_LIMIT_S} s"
    finally:
        try:
            os.killpg(launcher.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        launcher.wait(timeout=15)
