"""An editor finds the public names, where they are written and what they take, without importing a framework."""

import subprocess
import sys
from pathlib import Path

import jedi
import pytest

import hyper_parallel

PACKAGE = Path(hyper_parallel.__file__).parent
PROJECT = jedi.get_default_project(PACKAGE)


def script(*lines):
    return jedi.Script("\n".join(lines), path=PACKAGE.parent / "written_in_an_editor.py", project=PROJECT)


def found(*lines):
    """What the name at the end of the last line leads to."""
    return script(*lines).goto(len(lines), len(lines[-1]), follow_imports=True)


@pytest.mark.parametrize("name", hyper_parallel.__all__)
def test_every_public_name_leads_to_its_source(name):
    (source,) = found(f"from hyper_parallel import {name}")
    assert PACKAGE in source.module_path.parents and source.module_path != PACKAGE / "__init__.py"
    # The only public value among classes and functions; a comment above says what it is.
    if name == "ops_to_save":
        assert source.type == "statement"
    else:
        assert source.type in ("class", "function") and source.docstring(raw=True)


def test_a_method_of_a_style_leads_to_its_source():
    (method,) = found("from hyper_parallel import ExpertTensorParallel", "ExpertTensorParallel().apply")
    assert PACKAGE / "core" in method.module_path.parents
    (signature,) = method.get_signatures()
    assert [parameter.name for parameter in signature.params][-2:] == ["module", "device_mesh"]


def test_completion():
    names = [completion.name for completion in script("import hyper_parallel", "hyper_parallel.Expert").complete()]
    assert names == ["ExpertParallel", "ExpertTensorParallel"]
    mesh = ("from hyper_parallel import init_device_mesh", 'mesh = init_device_mesh("cpu", (2, 2))["ep"]', "mesh.get_")
    names = [completion.name for completion in script(*mesh).complete()]
    assert names == ["get_coordinate", "get_group", "get_local_rank"]


def test_the_modules_show_their_arguments():
    (signature,) = script("from hyper_parallel import GroupedExperts", "GroupedExperts(").get_signatures()
    assert [parameter.name for parameter in signature.params][:3] == ["dim", "hidden_dim", "num_experts"]


def test_what_a_name_table_would_hide_is_noticed(tmp_path):
    """Negative control: names that only exist at run time are not found."""
    hidden = 'def __getattr__(name):\n    return __import__("importlib").import_module("os").path\n'
    (tmp_path / "hidden.py").write_text(hidden)
    project = jedi.Project(tmp_path, added_sys_path=[str(tmp_path)])
    assert not jedi.Script("from hidden import Name", project=project).goto(1, 20, follow_imports=True)


def test_names_of_a_platform_are_looked_up_when_they_are_asked_for():
    program = (
        "import sys, hyper_parallel\n"
        "assert set(hyper_parallel.__all__) <= set(dir(hyper_parallel))\n"
        "assert not {'torch', 'mindspore'} & set(sys.modules)\n"
        "assert 'MoE' not in vars(hyper_parallel)\n"
        "try:\n    hyper_parallel.NoSuchName\n"
        "except AttributeError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "module 'hyper_parallel' has no attribute 'NoSuchName'\n"
