"""The complete examples of the README and of docs/ run as they are, started by the launchers of platform/."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 120
REQUIRED = os.environ.get("HYPER_PARALLEL_TEST_PLATFORMS", "")


def python_blocks(document):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(encoding="utf-8"), re.S | re.M)


def complete_examples():
    """(name, platform, code) of each. In docs/ the first line of a complete block says where it runs."""
    for number, (platform, code) in enumerate(zip(("torch", "mindspore"), python_blocks("README.md"))):
        yield f"README.md-{number}", platform, code
    for document in sorted(ROOT.glob("docs/*.md")):
        for number, code in enumerate(python_blocks(document)):
            marked = re.match(r"# Runs on 4 (torch|MindSpore) ranks\.\n", code)
            if marked:
                yield f"{document.name}-{number}", marked[1].lower(), code


EXAMPLES = {name: (platform, code) for name, platform, code in complete_examples()}


def run_on_four_ranks(platform, script, folder):
    """Exit code and everything printed. Whatever was started is gone when this returns."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = dict(os.environ, PYTHON=sys.executable, PYTHONPATH=paths)
    environment.update(TMPDIR=str(folder), LOG_DIR=str(folder / "log"))
    output = folder / "output"
    with open(output, "wb") as stream:
        launcher = subprocess.Popen(
            [ROOT / "platform" / platform / "launch.sh", "4", script], cwd=folder, env=environment,
            stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
        )
        try:
            code = launcher.wait(timeout=TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            code = f"none after {TIME_LIMIT_S} s"
            # Ranks live in sessions of their own; their launcher ends them when it is asked to end.
            launcher.terminate()
            try:
                launcher.wait(timeout=15)
            except subprocess.TimeoutExpired:
                pass
        finally:
            try:
                os.killpg(launcher.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            launcher.wait(timeout=15)
    return code, output.read_text(encoding="utf-8", errors="replace")


def test_examples_are_found():
    assert {platform for platform, _ in EXAMPLES.values()} == {"torch", "mindspore"}
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name, tmp_path):
    platform, code = EXAMPLES[name]
    if REQUIRED and platform not in REQUIRED.replace(" ", "").split(","):
        pytest.skip(f"{platform} is not in HYPER_PARALLEL_TEST_PLATFORMS={REQUIRED}")
    if not REQUIRED and importlib.util.find_spec(platform) is None:
        pytest.skip(f"{platform} is not installed")
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")

    exit_code, output = run_on_four_ranks(platform, script, tmp_path)

    assert exit_code == 0, output[-4000:]
    if name.startswith("README"):
        lines = re.findall(r"rank (\d): w1 \(4, 32, 16\), here \(2, 16, 16\); difference from one device (\S+)", output)
        assert {rank for rank, _ in lines} == {"0", "1", "2", "3"}, output[-4000:]
        assert all(float(difference) < 1e-6 for _, difference in lines)
