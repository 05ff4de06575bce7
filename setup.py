"""Packaging. Pure Python: native operations are compiled on first use from the sources under csrc/, which travel in the
wheel as package data. Nothing here imports torch, so the package installs in any order relative to it."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def version() -> str:
    found = re.search(r'^__version__ = "([^"]+)"', (ROOT / "zeroengine" / "__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError("zeroengine/__init__.py has no __version__")
    return found.group(1)


HF = ["transformers>=5,<6", "accelerate>=1.10", "safetensors", "gguf"]

setup(
    name="zeroengine",
    version=version(),
    description="A PyTorch training engine centred on ZeRO sharding",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    # zeroengine.csrc is the folder csrc/ of the checkout: sources only, no Python.
    packages=[*find_packages(include=["zeroengine", "zeroengine.*"]), "zeroengine.csrc"],
    package_dir={"zeroengine.csrc": "csrc"},
    package_data={
        "zeroengine": ["py.typed"],
        "zeroengine.csrc": ["**/*.cpp", "**/*.cu", "**/*.h", "**/*.cuh"],
    },
    entry_points={"console_scripts": ["zerorun = zeroengine.launcher.cli:main"]},
    install_requires=[
        # 2.9 is the first release whose torch.accelerator reports memory on every kind of device. Development and the
        # pinned set-up (constraints.txt) are on 2.13.
        "torch>=2.9",
        "pydantic>=2",
        "psutil",
        "ninja",
        "py-cpuinfo",
    ],
    extras_require={
        "hf": HF,
        "examples": [*HF, "tqdm"],
        "test": ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "mypy", "clang-format"],
        "bench": ["matplotlib"],
        # A peer of the benchmarks; its build reads the installed torch, so it is installed by itself and last.
        "peers": ["deepspeed"],
    },
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
