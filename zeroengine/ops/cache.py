"""The cache of built libraries: one file each, made once however many processes ask. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from zeroengine.ops.compile import CompileError, compile_library
from zeroengine.ops.sources import Sources
from zeroengine.ops.toolchain import Compiler


class BuildFailed(Exception):
    """A library could not be built; the message is the reason, in one line."""


class Cache:
    """`folder`/<name>-<key>.so, with a lock file beside each while it is built, and a .failed file after a failure."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, sources: Sources, key: str, compiler: Compiler, flags: Sequence[str], again: bool = False) -> Path:
        """The library, built if it is not there. `again`: what is there is damaged; build over it.

        Raises:
            BuildFailed: it is not there and cannot be built, or cannot be written.
        """
        target = self.folder / f"{sources.name}-{key}.so"
        seen = _identity(target)
        if seen is not None and not again:
            return target
        began = time.time_ns()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._lock(target.with_suffix(".lock")):
                if _identity(target) not in (None, seen):  # another process made it while this one waited
                    return target
                self._adopt_failure(target, began)
                self._build(target, sources, compiler, flags)
        except OSError as error:
            where = error.filename or self.folder
            raise BuildFailed(
                f"the cache of built libraries cannot be written ({where}: {error.strerror}); set ZE_CACHE_DIR to a folder that can"
            ) from error
        return target

    @contextlib.contextmanager
    def _lock(self, path: Path) -> Iterator[None]:
        """Held by at most one process. The kernel frees it with the process, so none can be left behind; the compiler
        does not inherit it."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError:
                pass  # a file system without locks: several may build, and the last to rename wins with the same content
            yield
        finally:
            os.close(handle)

    def _adopt_failure(self, target: Path, began: int) -> None:
        """Where another process tried and failed while this one waited, its answer is this one's too."""
        failed = target.with_suffix(".failed")
        with contextlib.suppress(FileNotFoundError):
            if began < failed.stat().st_mtime_ns <= time.time_ns():  # not one of the future, of another host's clock
                raise BuildFailed(failed.read_text(errors="replace").partition("\n")[0])

    def _build(self, target: Path, sources: Sources, compiler: Compiler, flags: Sequence[str]) -> None:
        failed = target.with_suffix(".failed")
        for left in self.folder.glob(f".{target.stem}.*"):  # of a builder that was killed: this one holds the lock
            shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.stem}.", dir=self.folder))
        try:
            made = work / target.name
            compile_library(sources, compiler, flags, made)
            os.chmod(made, 0o755)
            with made.open("rb") as file:
                os.fsync(file.fileno())
            os.rename(made, target)
            failed.unlink(missing_ok=True)
        except CompileError as error:
            reason = f"{error} (all of it in {failed})" if error.output else str(error)
            failed.write_text(f"{reason}\n{error.output}")
            raise BuildFailed(reason) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _identity(path: Path) -> tuple[int, int] | None:
    """(inode, time of change) of a file; None where it is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
