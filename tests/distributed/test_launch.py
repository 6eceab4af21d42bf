"""The launchers and environment files of platform/, as they are, on CPU ranks."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import require
from tests.harness.launching import launch

ROOT = Path(__file__).resolve().parents[2]
BREAK_RANK_1 = """
import os, sys

from hyper_parallel import check
from hyper_parallel.platform import get_platform, set_platform

set_platform("{platform}")
if (os.environ.get("RANK") or os.environ.get("RANK_ID")) == "1":
    platform = type(get_platform())
    exchange = platform.all_to_all_rows
    platform.all_to_all_rows = lambda *arguments: exchange(*arguments) * 0
sys.exit(check.main(["--device", "cpu", "--ep", "2"]))
"""


@pytest.fixture(params=["torch", "torch_npu", "mindspore"])
def launcher(request):
    """The name of a folder in platform/; torch_npu's launcher runs CPU ranks of torch here."""
    require(request.param.removesuffix("_npu"))
    return request.param


@pytest.mark.ranks
def test_check_on_two_hosts(launcher, tmp_path):
    first, second = launch(launcher, 2, ["-m", "hyper_parallel.check", "--device", "cpu"], tmp_path, num_hosts=2)
    assert (first[0], second[0]) == (0, 0), first[1][-3000:] + second[1][-3000:]
    outputs = first[1] + second[1]
    assert outputs.count("all right\n") == 1 and "mesh            ep 2 x tp 2" in outputs
    assert "WRONG" not in outputs


@pytest.mark.ranks
def test_check_fails_on_a_wrong_rank(launcher, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(BREAK_RANK_1.format(platform=launcher.removesuffix("_npu")), encoding="utf-8")
    ((code, output),) = launch(launcher, 2, [script], tmp_path)
    assert code == 1, output[-3000:]
    assert re.search(r"all-to-all of rows, ep +WRONG on rank 1\n", output) and "\nFAILED\n" in output
    assert "rank 1: all-to-all of rows over ep, ranks [0, 1]: " in output


@pytest.mark.parametrize("folder", ["torch_npu", "mindspore"])
def test_environment_keeps_what_is_set(folder):
    script = f"set -euo pipefail; source {ROOT}/platform/{folder}/environment.sh; env"
    environment = {"PATH": "/usr/bin:/bin", "HCCL_EXEC_TIMEOUT": "7"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    values = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert values["HCCL_EXEC_TIMEOUT"] == "7" and values["HCCL_CONNECT_TIMEOUT"] == "300"


@pytest.mark.parametrize("folder", ["torch", "torch_npu", "mindspore"])
def test_launcher_without_arguments_explains_itself(folder):
    done = subprocess.run([ROOT / "platform" / folder / "launch.sh"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and f"platform/{folder}/launch.sh NPROC -m module" in done.stderr
    assert "set -euo" not in done.stderr
