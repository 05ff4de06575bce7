"""One compilation: a ninja file in a folder of its own, and what went wrong in one line. Imports no torch."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from zeroengine.ops.sources import Sources
from zeroengine.ops.toolchain import Compiler, find_ninja, run_bounded

_DIGEST = 32  # bytes of a SHA-256 that follow a library: what was cut or damaged on a disk kills the process that loads it
_SECONDS = 600  # a compiler that takes longer hangs
_LINE = 300
_LINKING = ("-l", "-L", "-Wl,")


class CompileError(Exception):
    """The compiler failed. The message is one line; `output` is all that it said."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


def compile_library(sources: Sources, compiler: Compiler, flags: Sequence[str], target: Path) -> None:
    """Compiles `sources` to `target`; other files go beside it. Raises CompileError, or OSError from writing."""
    objects, commands = [], []
    units_flags = [f for f in flags if f != "-shared" and not f.startswith(_LINKING)]
    for unit in sources.units:
        made = target.with_name(f"{unit.name}.o")
        objects.append(str(made))
        commands.append([*compiler.command, *units_flags, "-I", str(sources.folder), "-c", str(unit), "-o", str(made)])
    link = [*compiler.command, *flags, *objects, "-o", str(target)]
    ninja = find_ninja()
    if ninja is None:  # the same commands, one after another
        for command in (*commands, link):
            _run(command, target.parent, compiler)
    else:
        rules = target.with_name("build.ninja")
        text = _ninja_file(sources, commands, objects, link, target)
        rules.write_text(text, encoding="utf-8", errors="surrogateescape")  # a path may hold any bytes
        _run([ninja, "-f", str(rules)], target.parent, compiler)
    if not target.is_file():
        raise CompileError(f"the compiler ({shlex.join(compiler.command)}) reports success and made no library")
    with target.open("r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(digest)


def is_whole(library: Path) -> bool:
    """Whether a file can be read, and is what `compile_library` made."""
    try:
        data = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-_DIGEST]).digest() == data[-_DIGEST:]


def _ninja_file(sources: Sources, commands: list[list[str]], objects: list[str], link: list[str], target: Path) -> str:
    def escaped(text: str) -> str:
        return text.replace("$", "$$")

    def path(text: str) -> str:
        return escaped(text).replace(" ", "$ ").replace(":", "$:")

    lines = []
    for i, (unit, command, made) in enumerate(zip(sources.units, commands, objects, strict=True)):
        lines += [f"rule unit{i}", f"  command = {escaped(shlex.join(command))}"]
        lines += [f"build {path(made)}: unit{i} {path(str(unit))}"]
    lines += ["rule link", f"  command = {escaped(shlex.join(link))}"]
    lines += [f"build {path(str(target))}: link {' '.join(map(path, objects))}", ""]
    return "\n".join(lines)


def _run(command: Sequence[str], folder: Path, compiler: Compiler) -> None:
    """Runs to the end, with all that it started: a compiler that hangs leaves no process behind."""
    try:
        code, output = run_bounded(command, _SECONDS, folder)
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"the compiler did not end within {_SECONDS} s") from error
    if code:
        raise CompileError(f"the compiler failed: {_cause(output, compiler) or f'exit code {code}'}", output)


def _cause(output: str, compiler: Compiler) -> str:
    """The line of a compiler's output that says most; empty where it said nothing."""
    echo = ("FAILED", "ninja:", "[", shlex.join(compiler.command))  # ninja's own lines
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith(echo)]
    told = [line for line in lines if any(word in line.lower() for word in ("error", "failed:")) and not line.startswith("collect2:")]
    return (told or lines[-1:] or [""])[0][:_LINE]
