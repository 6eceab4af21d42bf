"""Build the libraries that stand in for CANN: `python tests/npu_sim/build.py FOLDER`, in an environment with torch_npu.

The names of the libraries, and the functions that must exist in them, are read from the installed wheel with readelf
and nm, so that another release of torch_npu gets what it asks for. Functions that src/ does not define are generated;
called, they print their name and report failure.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
HCCL = SOURCES / "hccl.c"
# Compiled from src/; every other library that the wheel needs is another name of the first.
RUNTIME, COLLECTIVES = "libascendcl.so", "libhccl.so"
OWN_SYMBOLS = re.compile(r"^(acl|rt[A-Z]|Msprof|Hccl)")
# These return no error code but a pointer or a number, for which 0 is the harmless answer.
RETURNS_NOTHING = re.compile(r"^(acl|aclop)Create|^aclGetTensorDesc|^MsprofSysCycleTime")
FAILURE = 500000
COMPILE = ["gcc", "-O2", "-Wall", "-Wno-unused-parameter", "-shared", "-fPIC"]


def main(folder):
    """FOLDER/stubs holds generated functions only, FOLDER/runtime those of src/ too."""
    libraries = wheel_libraries()
    symbols, names = undefined_symbols(libraries), needed_libraries(libraries)
    for kind, runtime, collectives in (
        ("stubs", [], []),
        ("runtime", sorted(set(SOURCES.glob("*.c")) - {HCCL}), [HCCL]),
    ):
        target = Path(folder) / kind
        target.mkdir(parents=True, exist_ok=True)
        generated = target / "generated.c"
        generated.write_text(stub_source(symbols))
        link(target / RUNTIME, *runtime, generated)
        link(target / COLLECTIVES, *(collectives or [generated]))
        for name in names - {RUNTIME, COLLECTIVES}:
            (target / name).unlink(missing_ok=True)
            (target / name).symlink_to(RUNTIME)


def wheel_libraries():
    """What `import torch_npu` loads. Finding the package does not import it, which would fail before the build."""
    root = Path(importlib.util.find_spec("torch_npu").origin).parent
    names = ("libtorch_npu.so", "libtensorpipe.so", "libnpu_profiler.so")
    return [*root.glob("_C*.so"), *(root / "lib" / name for name in names)]


def undefined_symbols(libraries):
    """Functions of CANN that the wheel's libraries are linked against."""
    symbols = set()
    for library in libraries:
        for line in output("nm", "-D", "--undefined-only", library):
            name = line.split()[-1]
            if OWN_SYMBOLS.match(name) and "@" not in name:
                symbols.add(name)
    return symbols


def needed_libraries(libraries):
    """Libraries that the loader asks for and that neither torch nor the system has."""
    needed = set()
    for library in libraries:
        found = (re.search(r"\(NEEDED\).*\[(.*)\]", line) for line in output("readelf", "-d", library))
        needed |= {match.group(1) for match in found if match}
    return {name for name in needed if re.match(r"lib(hccl|ascendcl|acl_|ge_|graph)", name)}


def stub_source(symbols):
    """C source with a weak definition of every symbol, which a function in src/ of the same name replaces. Alone, they
    make a machine without devices."""
    lines = [
        "#include <stdio.h>",
        "__attribute__((weak)) long aclrtGetDeviceCount(unsigned *count) { *count = 0; return 0; }",
    ]
    for name in sorted(set(symbols) - {"aclrtGetDeviceCount"}):
        result = 0 if RETURNS_NOTHING.match(name) else FAILURE
        lines.append(
            f"__attribute__((weak)) long {name}(void) "
            f'{{ fputs("[npu-sim] {name} is not simulated\\n", stderr); return {result}; }}'
        )
    return "\n".join(lines) + "\n"


def link(library, *sources):
    subprocess.run([*COMPILE, "-o", library, f"-Wl,-soname,{library.name}", *sources], check=True, timeout=120)


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.splitlines()


if __name__ == "__main__":
    main(*sys.argv[1:])
