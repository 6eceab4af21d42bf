"""The documents hold: links resolve, names exist, code compiles, and the rules on imports are kept."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hyper_parallel
from hyper_parallel import huggingface, lora
from hyper_parallel.platform.platform import Platform

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("*.md", "docs/*.md", "platform/*/README.md", "tests/README.md", "tests/*/README.md")
DOCUMENTS = [path for where in PLACES for path in sorted(ROOT.glob(where))]
TRANSLATIONS = [path for path in DOCUMENTS if path.name.endswith(".zh.md")]
FRAMEWORKS = {"torch", "mindspore"}
REFERENCE_ENTRY = r"^::: hyper_parallel\.(\S+)\n(?:    options:\n      heading: (\w+)\n)?"


def name_of(path):
    return str(path.relative_to(ROOT))


def fenced_blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.S | re.M)


def text_without_blocks(path):
    return re.sub(r"^ *```.*?^ *```$", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)


def text_outside_code(path):
    return re.sub(r"`[^`\n]*`", "", text_without_blocks(path))


def anchors(path):
    """The names under which GitHub links to the headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def heading_levels(path):
    return [len(marks) for marks in re.findall(r"^(#+) ", text_without_blocks(path), re.M)]


def table_sizes(path):
    """(rows, columns) of each table; escaped bars and those in code are text."""
    tables = re.findall(r"(?:^\|.*\n)+", text_outside_code(path), re.M)
    return [tuple(row.replace("\\|", "").count("|") - 1 for row in table.splitlines()) for table in tables]


def code_blocks(path):
    return re.findall(r"^ *```.*?^ *```$", path.read_text(encoding="utf-8"), re.S | re.M)


def addresses(path):
    """The pages elsewhere that a document sends its reader to."""
    return re.findall(r"\]\((https?://[^)\s]+)\)", text_outside_code(path))


def imported_modules(source):
    """Top-level packages that a source file imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


def names_imported_from_us(source):
    """Names that a code block imports from hyper_parallel itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "hyper_parallel":
            yield from (alias.name for alias in node.names)


def test_all_documents_are_found():
    names = {name_of(path) for path in DOCUMENTS}
    assert {
        "README.md",
        "README.zh.md",
        "docs/expert_parallel.zh.md",
        "docs/ascend.zh.md",
        "docs/architecture.md",
    } <= names


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_relative_links_resolve(document):
    links = re.findall(r"\]\(([^)\s]+)\)", text_outside_code(document))
    broken = []
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (document.parent / target).resolve() if target else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_python_blocks_compile_and_import_public_names(document):
    for block in fenced_blocks(document, "python"):
        compile(block, name_of(document), "exec")
        assert set(names_imported_from_us(block)) <= set(hyper_parallel.__all__)


def test_the_reference_has_every_public_name():
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    entries = re.findall(REFERENCE_ENTRY, reference, re.M)
    listed = {heading or path.split(".")[-1] for path, heading in entries}
    of_packages = set()
    for package in (huggingface, lora):
        prefix = package.__name__.split(".")[1] + "."
        assert {path.split(".")[1] for path, _ in entries if path.startswith(prefix)} == set(package.__all__)
        of_packages |= set(package.__all__)
    assert listed == set(hyper_parallel.__all__) | of_packages


def test_the_page_on_hugging_face_weights_lists_every_family():
    page = (ROOT / "docs" / "huggingface_moe.md").read_text(encoding="utf-8")
    table = page.split("| `model_type` |")[1].split("\n\n")[0]
    lines = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert sorted(re.findall(r"`(\w+)`", " ".join(lines))) == sorted(huggingface.families.FAMILIES)


def test_the_site_shows_every_page_of_docs():
    navigation = (ROOT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [path.name for path in ROOT.glob("docs/*.md") if f" docs/{path.name}\n" not in navigation]


def test_readme_shows_an_example_per_framework():
    torch_example, mindspore_example, *_ = fenced_blocks(ROOT / "README.md", "python")
    assert "torch" in set(imported_modules(torch_example))
    assert "mindspore" in set(imported_modules(mindspore_example))
    assert "ExpertTensorParallel" in set(names_imported_from_us(torch_example))
    assert "ExpertTensorParallel" in set(names_imported_from_us(mindspore_example))


@pytest.mark.parametrize("translation", TRANSLATIONS, ids=name_of)
def test_a_translation_has_the_shape_of_its_page(translation):
    page = translation.with_name(translation.name.replace(".zh.md", ".md"))
    for part in (heading_levels, table_sizes, code_blocks, addresses):
        assert part(translation) == part(page), part.__name__


def test_index_arithmetic_example_holds():
    blocks = fenced_blocks(ROOT / "docs" / "architecture.md", "python")
    (example,) = [block for block in blocks if block.startswith("# Runs in one process")]
    exec(compile(example, "docs/architecture.md", "exec"), {})


def test_architecture_lists_every_verb_of_a_platform():
    section = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## The Platform interface")[1]
    table = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("|")]
    listed = [verb for line in table for verb in re.findall(r"`(\w+)`", line)]
    verbs = [name for name, value in vars(Platform).items() if callable(value) and not name.startswith("_")]
    assert sorted(listed) == sorted(verbs)


def test_importing_the_library_imports_no_framework():
    program = f"import hyper_parallel, sys; print({FRAMEWORKS} & set(sys.modules))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_core_imports_no_framework():
    files = sorted((ROOT / "hyper_parallel" / "core").rglob("*.py"))
    assert files
    imports = {name_of(file): FRAMEWORKS & set(imported_modules(file.read_text(encoding="utf-8"))) for file in files}
    assert not {file: frameworks for file, frameworks in imports.items() if frameworks}


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_only_a_platform_folder_imports_its_framework(framework):
    own_folder = ROOT / "hyper_parallel" / "platform" / framework
    offending = {
        name_of(file)
        for file in sorted((ROOT / "hyper_parallel").rglob("*.py"))
        if own_folder not in file.parents and framework in set(imported_modules(file.read_text(encoding="utf-8")))
    }
    assert not offending


def test_root_platform_folder_holds_no_python():
    assert not list((ROOT / "platform").rglob("*.py"))


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_launcher_explains_itself(framework):
    launcher = ROOT / "platform" / framework / "launch.sh"
    done = subprocess.run([launcher], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert f"platform/{framework}/launch.sh NPROC script.py" in done.stderr
    assert "set -euo" not in done.stderr
