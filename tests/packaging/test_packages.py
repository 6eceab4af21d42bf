"""What is published holds all that a stranger needs: built as a source distribution, and as a wheel from that."""

import email
import re
import zipfile
from pathlib import Path

import pytest

import hyper_parallel
from tests.harness.pool import free_port
from tests.packaging.packages import ROOT, build, copy_of_sources, fresh_environment, install, run

pytestmark = pytest.mark.slow  # They build, and install from the package index.


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("build")
    return build(copy_of_sources(folder), folder)[1]


def metadata(wheel):
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(zipfile.ZipFile(wheel).read(name))


def test_metadata(wheel):
    of = metadata(wheel)
    assert of["Name"] == "hyper_parallel" and of["Version"] == hyper_parallel.__version__
    assert of["License-Expression"] == "Apache-2.0" and of["License-File"] == "LICENSE"
    assert set(of["Requires-Python"].split(",")) == {">=3.10", "<3.13"}
    assert of.get_payload(decode=True).decode() == (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_platform_has_an_extra(wheel):
    folders = {path.parent.name.replace("_", "-") for path in ROOT.glob("platform/*/requirements.txt")}
    assert {"torch", "mindspore", "torch-npu"} <= folders
    assert folders | {"huggingface", "examples", "test"} == set(metadata(wheel).get_all("Provides-Extra"))


def test_the_wheel_holds_the_library_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [path for path in (ROOT / "hyper_parallel").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert names == {str(path.relative_to(ROOT)) for path in files}
    assert "hyper_parallel/py.typed" in names


def check_on_one_rank(platform, python, folder):
    check = ("-m", "hyper_parallel.check")
    if platform == "mindspore":  # which needs a scheduler beside the rank
        launcher = ROOT / "platform" / platform / "launch.sh"
        return run(launcher, "1", *check, cwd=folder, environment={"PYTHON": str(python)})
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return run(python, *check, cwd=folder, environment={**rank, "OMP_NUM_THREADS": "1"})


def test_a_stranger_installs_it_with_an_extra_and_runs_the_check(wheel, platform, tmp_path):
    python = fresh_environment(tmp_path)
    install(python, f"hyper_parallel[{platform}] @ {wheel.as_uri()}", tmp_path)
    found = run(python, "-c", "import hyper_parallel; print(hyper_parallel.__file__)", cwd=tmp_path)
    assert (tmp_path / "environment") in Path(found).parents
    said = check_on_one_rank(platform, python, tmp_path)
    assert re.search(rf"^  hyper_parallel +{re.escape(hyper_parallel.__version__)}$", said, re.M), said
    assert re.search(rf"^  {platform} +\S", said, re.M) and said.rstrip().endswith("all right"), said


def test_an_sdist_without_extras_is_noticed(tmp_path):
    """Negative control: as it was when ``setup.py`` read the extras from files that a source distribution lacks."""
    sources = copy_of_sources(tmp_path)
    project = (sources / "pyproject.toml").read_text(encoding="utf-8")
    without, number = re.subn(r"^\[project.optional-dependencies\]\n.*?(?=^\[)", "", project, flags=re.S | re.M)
    assert number == 1
    (sources / "pyproject.toml").write_text(without, encoding="utf-8")
    _, wheel = build(sources, tmp_path)
    with pytest.raises(AssertionError, match="does not provide the extra 'torch'"):
        install(fresh_environment(tmp_path), f"hyper_parallel[torch] @ {wheel.as_uri()}", tmp_path)


def test_a_requirement_that_is_not_there_is_noticed(tmp_path):
    """Negative control: what an extra asks for is really looked for."""
    sources = copy_of_sources(tmp_path)
    project = (sources / "pyproject.toml").read_text(encoding="utf-8")
    (sources / "pyproject.toml").write_text(project.replace('"torch>=', '"torch>=99", "torch>='), encoding="utf-8")
    _, wheel = build(sources, tmp_path)
    with pytest.raises(AssertionError, match="No matching distribution found for torch>=99"):
        install(fresh_environment(tmp_path), f"hyper_parallel[torch] @ {wheel.as_uri()}", tmp_path)
