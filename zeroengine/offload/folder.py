"""This process' folder for what it keeps on disk: made with a lock, removed at the end, and swept up after a crash.

A folder belongs to the process that holds the `flock` on the file `lock` in it. The kernel frees it with its holder, so a
folder of this host whose lock can be had is of a dead process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import time
import weakref
from pathlib import Path

from zeroengine.errors import OffloadError
from zeroengine.logging import logger

_PREFIX, _NEW = "zeroengine-offload.", ".zeroengine-offload-new."
_ABANDONED = 600.0  # seconds after which a folder that never got its name is of a dead process
_REMEDIES = {
    errno.ENOSPC: "free some space there, choose a folder on another disk, or use more ranks or a lower `ratio`",
    errno.EDQUOT: "the quota is used up: free some space there or choose another folder",
    errno.EFBIG: "files may not be that large here (ulimit -f, or the file system): raise the limit or choose another folder",
    errno.EACCES: "make the folder writable for this user or choose another one",
    errno.EPERM: "make the folder writable for this user or choose another one",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.ENOTDIR: "a part of the path is a file: choose another folder",
    errno.ENOENT: "the folder was removed: keep it for as long as the job runs",
    errno.EIO: "the disk fails: choose a folder on another one",
}


def remedy(code: int | None) -> str:
    """What to do about an errno of the file system."""
    return _REMEDIES.get(code or 0, "look at the disk and its file system, or choose another folder")


class RankFolder:
    """`<base>/zeroengine-offload.<host>.rank<r>.<pid>.<n>`. `base` is made if need be.

    Raises OffloadError where it cannot be made or written.
    """

    def __init__(self, base: str | os.PathLike[str], rank: int) -> None:
        self.rank = rank
        self.asked = str(base)
        self._pid = os.getpid()
        host = socket.gethostname()
        try:
            self.base = Path(base).expanduser().absolute()
            self.base.mkdir(parents=True, exist_ok=True)
            sweep(self.base, host)
            self.path, lock = self._make(host)
        except OSError as error:
            raise OffloadError(
                f"rank {rank} on {host}: no folder for offloaded state in {base}: {error.strerror or error}; {remedy(error.errno)}"
            ) from error
        self._end = weakref.finalize(self, _remove, self.path, lock, self._pid)

    def _make(self, host: str) -> tuple[Path, int]:
        """The folder, and the descriptor that holds its lock."""
        new = self.base / f"{_NEW}{host}.{self._pid}.{time.monotonic_ns()}"
        new.mkdir(mode=0o700)
        lock = os.open(new / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        number = 0
        while True:
            path = self.base / f"{_PREFIX}{host}.rank{self.rank}.{self._pid}.{number}"
            try:
                new.rename(path)  # an empty folder would be replaced, but none of ours is
                return path, lock
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                number += 1

    def there(self) -> bool:
        """It has not been removed."""
        return self.path.is_dir()

    def remove(self) -> None:
        """Removes the folder with all files. Also done when the interpreter ends, or nobody has this object any more."""
        self._end()


def _remove(path: Path, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has no part in it
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def sweep(base: Path, host: str) -> None:
    """Removes folders in `base` that dead processes of this host left behind."""
    for path in base.glob(f"{_PREFIX}{host}.*"):
        if _is_free(path / "lock"):
            shutil.rmtree(path, ignore_errors=True)
            logger.info("removed %s, which a process that ended without cleaning up had left", path)
    for path in base.glob(f"{_NEW}{host}.*"):
        try:
            old = time.time() - path.stat().st_mtime > _ABANDONED
        except OSError:
            continue
        if old and _is_free(path / "lock"):
            shutil.rmtree(path, ignore_errors=True)


def _is_free(lock: Path) -> bool:
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:  # another user's
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
