"""Building the project as it is published, and installing it as a stranger does: elsewhere, without the checkout."""

import os
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 120
NOT_SOURCES = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "runs", "rank_*")


def copy_of_sources(folder: Path) -> Path:
    """The checkout without what it ignores: a file left by an earlier build is not to mend this one."""
    return shutil.copytree(ROOT, folder / "sources", ignore=NOT_SOURCES)


def build(sources: Path, folder: Path) -> tuple[Path, Path]:
    """Build the sdist, and from it the wheel, with this environment's setuptools; returns both."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", sources, cwd=folder)
    (sdist,), (wheel,) = (list((folder / "dist").glob(pattern)) for pattern in ("*.tar.gz", "*.whl"))
    return sdist, wheel


def fresh_environment(folder: Path) -> Path:
    """A new environment that finds what is installed in this one, except the library; returns its interpreter.

    What is installed here is seen through a folder of links: frameworks are large, and pip leaves alone what lies
    outside of the environment that it works on.
    """
    shelf = folder / "shelf"
    shelf.mkdir()
    installed = [entry for place in reversed(sys.path) if place.endswith("packages") for entry in Path(place).iterdir()]
    for name, entry in {entry.name: entry for entry in installed}.items():
        if "hyper_parallel" not in name and entry.suffix != ".pth":
            (shelf / name).symlink_to(entry)
    home = folder / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    (site_packages,) = home.glob("lib/python*/site-packages")
    (site_packages / "shelf.pth").write_text(f"{shelf}\n")
    return home / "bin" / "python"


def install(python: Path, requirement: str, folder: Path) -> str:
    """Let pip install, with nothing but what is there already; returns what it said.

    Raises:
        AssertionError: pip cannot find something that is required, or does not know an extra.
    """
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index")
    said = run(*pip, requirement, cwd=folder, environment={"PIP_CONFIG_FILE": os.devnull})
    assert "does not provide the extra" not in said, said
    return said


def run(*command: str | Path, cwd: Path, environment: dict[str, str] | None = None) -> str:
    """What a command prints. It sees nothing of the checkout, and nothing of what it started is left.

    Raises:
        AssertionError: it fails, or takes too long; with what it printed.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "HYPER_"))}
    with started(command, cwd, {**inherited, **(environment or {})}) as process:
        try:
            said, _ = process.communicate(timeout=TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{command} took more than {TIME_LIMIT_S} s") from None
    assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{said}"
    return said


@contextmanager
def started(command: tuple[str | Path, ...], cwd: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
