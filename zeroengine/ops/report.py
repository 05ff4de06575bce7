"""`zerorun env`: what this machine has, and what will run on it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from zeroengine.arguments import Parser
from zeroengine.errors import ZeroEngineError
from zeroengine.ops.build import cache_folder, mode
from zeroengine.ops.registry import OPERATIONS, choose
from zeroengine.ops.sources import csrc
from zeroengine.ops.toolchain import Compiler, cpu_features, find_cxx, find_ninja, find_nvcc

_PACKAGES = ("zeroengine", "torch", "transformers", "accelerate", "deepspeed", "pydantic", "numpy", "ninja")
# The features that decide how wide and in which types the loops run.
_TELLING = (
    "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve",
    "bf16",
)  # fmt: skip

Section = dict[str, str]


def run(argv: Sequence[str]) -> int:
    """The command; 0, also where everything runs on twins."""
    parser = Parser("zerorun env", description="versions, devices, compilers, and which operation runs how")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--no-build", action="store_true", help="does not build what is not built yet")
    options = parser.parse_args(argv)
    sections = report(build=not options.no_build)
    sys.stdout.write(json.dumps(sections, indent=2) + "\n" if options.json else text(sections))
    return 0


def report(build: bool = True) -> dict[str, Section]:
    """{section: {name: value}}. With `build`, native libraries that are missing are built."""
    return {
        "versions": _versions(),
        "machine": _machine(),
        "devices": _devices(),
        "compilers": _compilers(),
        "operations": _operations() if build else {"": "not asked (--no-build)"},
    }


def text(sections: Mapping[str, Section]) -> str:
    lines: list[str] = []
    for title, section in sections.items():
        width = max(map(len, section), default=0)
        lines += [title, *(f"  {name:<{width}}  {value}".rstrip() for name, value in section.items()), ""]
    return "\n".join(lines)


def _versions() -> Section:
    found = {"python": f"{platform.python_version()} ({sys.executable})"}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "from a checkout" if name == "zeroengine" else "not installed"
    found["torch was built for"] = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU or another accelerator"
    return found


def _machine() -> Section:
    features = [f for f in _TELLING if f in cpu_features()]
    memory = psutil.virtual_memory()
    cores = psutil.cpu_count(logical=False) or os.cpu_count()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "cpu": _cpu_name(),
        "cpu features": " ".join(features) or "unknown",
        "cores": f"{cores} ({os.cpu_count()} threads), torch uses {torch.get_num_threads()} in this process",
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} free",
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _devices() -> Section:
    found: Section = {}
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        found[f"cuda:{i}"] = f"{about.name}, sm_{about.major}{about.minor}, {about.total_memory / 2**30:.0f} GiB"
    if not found and torch.accelerator.is_available():
        kind: Any = torch.accelerator.current_accelerator()
        found[str(kind)] = f"{torch.accelerator.device_count()}"
    return found or {"accelerators": "none; ranks run on the CPU"}


def _compilers() -> Section:
    def told(compiler: Compiler | str) -> str:
        if isinstance(compiler, str):
            return compiler
        lines = compiler.version.splitlines()
        version = next((line for line in lines if "release" in line), lines[0] if lines else "says no version")
        return f"{version} ({' '.join(compiler.command)})"

    return {
        "C++": told(find_cxx()),
        "CUDA": told(find_nvcc()),
        "ninja": find_ninja() or "none; files are compiled one after another",
        "sources": str(csrc() or "missing"),
        "cache": _cache(),
        "ZE_OPS": mode(),
    }


def _cache() -> str:
    try:
        return str(cache_folder())
    except RuntimeError as error:  # no home directory
        return f"none: {error}"


def _operations() -> Section:
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    found: Section = {}
    for op in OPERATIONS.values():
        for device in devices:
            try:
                choice = choose(op.name, device)
                found[f"{op.name} on {device}"] = f"{choice.implementation}: {choice.reason}"
            except ZeroEngineError as error:  # ZE_OPS=native: the report is where one looks for the cause
                found[f"{op.name} on {device}"] = f"error: {error}"
    return found
