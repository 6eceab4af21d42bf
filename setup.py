"""Packaging. The frameworks are extras, read from ``platform/<name>/requirements.txt``."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def requirements(path):
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


EXTRAS = {path.parent.name: requirements(path) for path in sorted(ROOT.glob("platform/*/requirements.txt"))}
EXTRAS["examples"] = ["rich>=13", "matplotlib>=3.8", "safetensors>=0.4"]
EXTRAS["test"] = ["pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "ruff>=0.6", *EXTRAS["examples"]]

setup(
    name="hyper_parallel",
    version="0.1.0",
    description="Expert Tensor Parallelism for Mixture-of-Experts models on MindSpore and PyTorch",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=find_packages(include=["hyper_parallel", "hyper_parallel.*"]),
    install_requires=["numpy>=1.25"],
    extras_require=EXTRAS,
)
