"""Files: what other readers see, what is read of them, and what is said of those that are not whole."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.checkpoint import CheckpointError, folders, tensor_files
from hyper_parallel.checkpoint.manifest import check_files, read_manifest, write_manifest
from hyper_parallel.checkpoint.tensor_files import Slice, checksum, read_box, write_file

ROOT = Path(__file__).resolve().parents[3]


def ignore(count):
    pass


def slice_of(name, values, dtype, offsets=None):
    return Slice(name, dtype, offsets or (0,) * values.ndim, values.shape, lambda: values)


def test_the_safetensors_package_reads_what_is_written(tmp_path):
    numpy_reader = pytest.importorskip("safetensors.numpy")
    from safetensors import safe_open

    values = {
        "flags": (np.array([True, False, True]), "BOOL"),
        "weight": (np.arange(6, dtype=np.float64).reshape(2, 3), "F64"),
        "scalar": (np.array(7, np.int64), "I64"),
        "none": (np.zeros((0, 4), np.float32), "F32"),
        "half": (np.arange(3, dtype=np.float16), "F16"),
    }
    path = tmp_path / "a.safetensors"
    about, starts = write_file(path, [slice_of(name, *value) for name, value in values.items()], ignore)
    found = numpy_reader.load_file(path)
    assert found.keys() == values.keys()
    for name, (array, _) in values.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)
        assert starts[name] % array.itemsize == 0
    assert about == checksum(path)
    with safe_open(path, "np") as stream:
        assert json.loads(stream.metadata()["DCP_SHARDING_INFO"])["weight"] == {"saved_offsets": [0, 0]}


@settings(max_examples=100, deadline=None)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4), window=st.sampled_from([1, 16, 1 << 18]), data=st.data()
)
def test_any_box_can_be_read(tmp_path_factory, shape, window, data):
    lower = [data.draw(st.integers(0, size - 1)) for size in shape]
    size = [data.draw(st.integers(1, end - start)) for start, end in zip(lower, shape)]
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    path = tmp_path_factory.mktemp("box") / "a"
    path.write_bytes(b"before" + values.tobytes())
    out = np.empty(size, np.float32)
    with pytest.MonkeyPatch.context() as patch, open(path, "rb", buffering=0) as stream:
        patch.setattr(tensor_files, "WINDOW", window)
        num_read = read_box(stream, 6, shape, lower, out)
    assert np.array_equal(out, values[tuple(slice(a, a + n) for a, n in zip(lower, size))])
    assert num_read >= out.nbytes and (window > 1 or num_read == out.nbytes)


def test_short_runs_are_read_together_and_long_ones_alone(tmp_path):
    values = np.zeros((8, 1 << 17), np.float32)
    (tmp_path / "a").write_bytes(values.tobytes())
    with open(tmp_path / "a", "rb", buffering=0) as stream:
        assert read_box(stream, 0, values.shape, (0, 0), out := np.empty((8, 1 << 16), np.float32)) == out.nbytes
        whole = read_box(stream, 0, (1 << 20,), (0,), np.empty(1 << 20, np.float32))
        assert whole == values.nbytes
        narrow = np.empty((1 << 19, 1), np.float32)
        assert narrow.nbytes < read_box(stream, 0, (1 << 19, 2), (0, 1), narrow) <= values.nbytes


def a_manifest(folder):
    (folder / "model").mkdir(parents=True)
    about, _ = write_file(folder / "model" / "a", [slice_of("w", np.arange(5.0), "F64")], ignore)
    write_manifest(folder, {"step": 1, "files": {"model/a": about}})
    return read_manifest(folder)


@pytest.mark.parametrize("change,words", [
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, not the"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\1"), "altered or exchanged"),
    (lambda path: path.unlink(), "is missing"),
])  # fmt: skip
def test_a_file_that_is_not_whole_is_named(tmp_path, change, words):
    manifest = a_manifest(tmp_path / "a")
    check_files(tmp_path / "a", manifest["files"])
    change(tmp_path / "a" / "model" / "a")
    with pytest.raises(CheckpointError, match=words) as caught:
        check_files(tmp_path / "a", manifest["files"])
    assert str(tmp_path / "a" / "model" / "a") in str(caught.value)


@pytest.mark.parametrize("change,words", [
    (lambda text: text[:-20], "truncated or altered"),
    (lambda text: text.replace('"step": 1', '"step": 2'), "was altered"),
    (lambda text: text.replace('"version": 1', '"version": 9'), "version 9"),
    (lambda text: "[]", "is not the manifest"),
])  # fmt: skip
def test_a_manifest_that_is_not_whole_is_named(tmp_path, change, words):
    a_manifest(tmp_path / "a")
    path = tmp_path / "a" / folders.MANIFEST
    path.write_text(change(path.read_text()))
    with pytest.raises(CheckpointError, match=words):
        read_manifest(tmp_path / "a")


def test_a_folder_with_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        folders.begin(tmp_path, ["model"])
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_nothing_in_the_package_pickles_or_imports_a_framework():
    files = sorted((ROOT / "hyper_parallel" / "checkpoint").rglob("*.py"))
    assert len(files) > 8
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert "pickle" not in text and "import torch" not in text and "import mindspore" not in text
    program = "import hyper_parallel.checkpoint, sys; print({'torch', 'mindspore', 'pickle'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"torch", "mindspore"} & set(done.stdout.split("'"))
