"""Compilers of this machine and the flags that native operations are built with. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ASK_SECONDS = 30
_END_SECONDS = 5.0  # for what was asked to end

# No contraction of a*b+c: every element gets the same bits in the body and in the tail of a loop, in the CPU loop, the CUDA
# kernel and the twin. Nothing here allows the compiler to reorder floating-point sums.
_CXX_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-pthread",
)
_NVCC_FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall")

# What -march=x86-64-v3 may use, by the names of /proc/cpuinfo.
_X86_V3 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")


@dataclass(frozen=True)
class Compiler:
    """A compiler that answered, how it is called, and what it says of itself (part of a build's key)."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Target:
    """The processor that code is built for: flags, and the CPU features without which it must not run."""

    flags: tuple[str, ...]
    needs: tuple[str, ...] = ()


@functools.cache
def cpu_features() -> tuple[str, ...]:
    """Features of the CPU as the kernel names them, sorted; only the architecture where there is no /proc/cpuinfo."""
    found: set[str] = {platform.machine()}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                found.update(value.split())
                break
    except OSError:
        pass
    return tuple(sorted(found))


def this_machine() -> Target:
    """For code that stays on this machine."""
    if platform.machine() in ("aarch64", "arm64"):
        return Target(("-mcpu=native",))
    # Compilers keep to half the width where whole vectors compute no faster. They move memory faster.
    wide = ("-mprefer-vector-width=512",) if "avx512f" in cpu_features() else ()
    return Target(("-march=native", *wide))


def portable() -> Target:
    """For code that travels in a wheel: the baseline of servers of the last ten years on x86-64, else the compiler's own."""
    if platform.machine() == "x86_64":
        return Target(("-march=x86-64-v3",), (platform.machine(), *_X86_V3))
    return Target((), (platform.machine(),))


def cxx_flags(target: Target) -> tuple[str, ...]:
    return (*_CXX_FLAGS, *target.flags)


def nvcc_flags(arch: str) -> tuple[str, ...]:
    """`arch`: as in sm_90, or native."""
    return (*_NVCC_FLAGS, f"-arch={arch}")


def find_cxx() -> Compiler | str:
    """$CXX, or the first of c++, g++ and clang++ that answers; else why not."""
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        try:
            return _ask(tuple(shlex.split(chosen)), "$CXX")
        except ValueError as error:
            return f"$CXX ({chosen}) is not a command: {error}"
    found = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    return _first(found, "the C++ compiler") or "no C++ compiler (c++, g++ or clang++) on PATH; install one, or set CXX"


def find_nvcc() -> Compiler | str:
    """The first nvcc that answers, of $CUDA_HOME, $CUDA_PATH, on PATH and in /usr/local/cuda; else why not."""
    homes = [os.environ[v] for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    paths = [shutil.which("nvcc", path=os.path.join(home, "bin")) for home in homes]
    paths += [shutil.which("nvcc"), shutil.which("nvcc", path="/usr/local/cuda/bin")]
    none = "no nvcc on PATH, in $CUDA_HOME or in /usr/local/cuda; install the CUDA toolkit, or set CUDA_HOME"
    return _first([path for path in paths if path], "nvcc") or none


def find_ninja() -> str | None:
    """The program ninja: on PATH, or of the Python package of that name."""
    found = [shutil.which("ninja")]
    try:
        import ninja
    except ImportError:
        pass
    else:
        found.append(shutil.which("ninja", path=str(ninja.BIN_DIR)))
    answers = _first([path for path in found if path], "ninja")
    return answers.command[0] if isinstance(answers, Compiler) else None


def run_bounded(command: Sequence[str], seconds: float, folder: Path | None = None, stderr: int = subprocess.STDOUT) -> tuple[int, str]:
    """Exit code and output of a program in a session of its own, of which nothing is left when it takes longer or this process is
    interrupted. Raises OSError where it cannot be run, subprocess.TimeoutExpired."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except BaseException:
        _end_all(process)
        raise
    return process.returncode, output


def _end_all(process: subprocess.Popen[str]) -> None:
    """Ends a process that leads a session, and what it started. ninja has its commands in groups of their own: it ends them when it is
    asked to, and they are looked up for when it is not able to."""
    import psutil  # not there where a wheel is built

    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _first(programs: Sequence[str], what: str) -> Compiler | str:
    """The first that answers, else why the first does not; nothing where there is none."""
    reason = ""
    for program in programs:
        found = _ask((program,), what)
        if isinstance(found, Compiler):
            return found
        reason = reason or found
    return reason


def _ask(command: tuple[str, ...], what: str) -> Compiler | str:
    named = f"{what} ({shlex.join(command)})"
    try:
        code, output = run_bounded([*command, "--version"], _ASK_SECONDS, stderr=subprocess.DEVNULL)
    except OSError as error:
        return f"{named} cannot be run: {error}"
    except subprocess.TimeoutExpired:
        return f"{named} cannot be run: --version did not end within {_ASK_SECONDS} s"
    if code != 0:
        return f"{named} does not work: --version ends with exit code {code}"
    return Compiler(command, output.strip())
