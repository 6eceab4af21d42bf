"""Rank pools for all tests, and the marker `ranks` on every test that starts some.

HYPER_PARALLEL_TEST_PLATFORMS ("torch", or "torch,mindspore") names the platforms that must be tested; without it the
installed ones are tested, and the others skipped.
"""

import importlib.util
import os
from collections.abc import Iterator

import pytest

from tests.harness.pool import RankPool

KNOWN = ("torch", "mindspore")
REQUIRED = tuple(filter(None, os.environ.get("HYPER_PARALLEL_TEST_PLATFORMS", "").replace(" ", "").split(",")))
PLATFORMS = REQUIRED or KNOWN
if not set(REQUIRED) <= set(KNOWN):
    raise pytest.UsageError(f"HYPER_PARALLEL_TEST_PLATFORMS={','.join(REQUIRED)}: the platforms are {','.join(KNOWN)}")


def require(platform: str) -> None:
    if platform not in PLATFORMS:
        pytest.skip(f"{platform} is not in HYPER_PARALLEL_TEST_PLATFORMS={','.join(REQUIRED)}")
    if importlib.util.find_spec(platform) is None:
        if REQUIRED:
            raise RuntimeError(f"HYPER_PARALLEL_TEST_PLATFORMS asks for {platform}, which is not installed")
        pytest.skip(f"{platform} is not installed")


def require_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: the extra [huggingface]")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that asks for a pool, directly or through another fixture, has the marker `ranks`."""
    for item in items:
        if any(name.endswith("pool") for name in getattr(item, "fixturenames", ())):
            item.add_marker("ranks")


@pytest.fixture(autouse=True)
def _only_marked_tests_start_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pool: RankPool) -> None:
        pytest.fail("this test starts ranks: mark it with @pytest.mark.ranks, or ask for a pool by a fixture")

    if request.node.get_closest_marker("ranks") is None:
        monkeypatch.setattr(RankPool, "_start", refuse)


@pytest.fixture(scope="session")
def torch_pool() -> Iterator[RankPool]:
    """Four ranks of PyTorch."""
    require("torch")
    with RankPool("torch", 4) as pool:
        yield pool


@pytest.fixture(scope="session")
def mindspore_pool() -> Iterator[RankPool]:
    """Four ranks of MindSpore."""
    require("mindspore")
    with RankPool("mindspore", 4) as pool:
        yield pool


@pytest.fixture
def hf_pool(torch_pool: RankPool) -> RankPool:
    """Four ranks of PyTorch for models of transformers."""
    require_transformers()
    return torch_pool


@pytest.fixture(scope="session", params=PLATFORMS)
def platform(request: pytest.FixtureRequest) -> str:
    """Runs a test once per platform, and all tests of one platform after each other."""
    require(request.param)
    return request.param


@pytest.fixture(scope="session")
def pool(platform: str, request: pytest.FixtureRequest) -> RankPool:
    """Four ranks of every platform in turn."""
    return request.getfixturevalue(f"{platform}_pool")


@pytest.fixture(scope="module")
def big_pool(platform: str) -> Iterator[RankPool]:
    """Eight ranks of every platform in turn, for one module only."""
    with RankPool(platform, 8) as pool:
        yield pool
