"""Packaging. Pure Python: native operations are compiled on first use from the sources under csrc/, which travel in the
wheel as package data. With ZE_BUILD_OPS=1 they are compiled now as well, but for those that include headers of torch, and
the wheel is for this kind of machine. Nothing here imports torch, so the package installs in any order relative to it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def version() -> str:
    found = re.search(r'^__version__ = "([^"]+)"', (ROOT / "zeroengine" / "__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError("zeroengine/__init__.py has no __version__")
    return found.group(1)


PREBUILD = os.environ.get("ZE_BUILD_OPS", "0") == "1"


class BuildWithOps(build_py):
    """Copies the package, and compiles the C++ libraries of csrc/ into it."""

    def run(self) -> None:
        super().run()
        if PREBUILD and not self.editable_mode:  # an editable install compiles on first use, for this very machine
            self._prebuild()

    def _prebuild(self) -> None:
        sys.path.insert(0, str(ROOT))
        from zeroengine.ops import prebuilt
        from zeroengine.ops.sources import Sources
        from zeroengine.ops.toolchain import find_cxx

        compiler = find_cxx()
        if isinstance(compiler, str):
            raise RuntimeError(f"ZE_BUILD_OPS=1: {compiler}")
        folder = Path(self.build_lib).resolve() / "zeroengine" / "ops" / "prebuilt"
        for name in sorted({p.parent.name for p in (ROOT / "csrc").glob("*/*.cpp")}):
            sources = Sources(ROOT / "csrc", name)
            if not sources.with_torch:  # it belongs to the torch that it runs with, and is compiled on first use
                prebuilt.build(sources, compiler, folder)


class BinaryDistribution(Distribution):
    """With compiled libraries inside, the wheel is for one platform."""

    def has_ext_modules(self) -> bool:
        return PREBUILD


def wheel_command() -> dict[str, Any]:
    """The libraries have a plain C interface: a wheel with them fits every Python 3 of the platform."""
    try:
        from setuptools.command.bdist_wheel import bdist_wheel
    except ImportError:  # setuptools < 70: the tag names this Python only
        return {}

    class PlatformWheel(bdist_wheel):
        def get_tag(self) -> tuple[str, str, str]:
            python, abi, platform = super().get_tag()
            return ("py3", "none", platform) if PREBUILD else (python, abi, platform)

    return {"bdist_wheel": PlatformWheel}


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
        "zeroengine.integrations.as_deepspeed": ["*.dist-info/METADATA"],
        "zeroengine.csrc": ["**/*.cpp", "**/*.cu", "**/*.h", "**/*.cuh"],
    },
    cmdclass={"build_py": BuildWithOps, **wheel_command()},
    distclass=BinaryDistribution,
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
        "tensorboard": ["tensorboard"],
        # peft, trl and bitsandbytes: their own users' trainers and weights are tested on the engine. tensorboard: what its monitor
        # writes is read again.
        "test": [
            *("peft", "trl", "bitsandbytes", "tensorboard"),
            *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "mypy", "clang-format"),
        ],
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
