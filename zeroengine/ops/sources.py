"""Where the sources of native libraries lie, and a hash of them. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

_FORMAT = "2"  # of the key; raised when the same inputs shall lead to another library
_HEADERS = (".h", ".hpp", ".cuh")
_EXPORTED = re.compile(rb"^ZE_EXPORT [\w ]+[ *](ze_\w+)\(", re.MULTILINE)


def csrc() -> Path | None:
    """The folder csrc: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if any(folder.glob("*/*.cpp")):
            return folder
    return None


def _is_source(path: Path, suffixes: tuple[str, ...]) -> bool:
    return path.suffix in suffixes and not path.name.startswith(".") and path.is_file()  # editors keep links beside a file


class Sources:
    """The files of one library: `<csrc>/<name>/*.cpp|cu`, and every header under csrc."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        units = sorted(p for p in (folder / name).glob("*") if _is_source(p, (".cpp", ".cu")))
        self.units: tuple[Path, ...] = tuple(units)
        self.cuda = any(p.suffix == ".cu" for p in units)

    @functools.cached_property
    def with_torch(self) -> bool:
        """Whether headers of torch are included: a build belongs to one version of it."""
        return any(b"#include <c10/" in p.read_bytes() for p in self.units)

    @functools.cached_property
    def functions(self) -> tuple[str, ...]:
        """Names that the library has for its callers."""
        return tuple(name.decode() for p in self.units for name in _EXPORTED.findall(p.read_bytes()))

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the names and contents of all files that the compiler may read here."""
        headers = sorted(p for p in self.folder.rglob("*") if _is_source(p, _HEADERS))
        total = hashlib.sha256(_FORMAT.encode())
        for path in (*self.units, *headers):
            total.update(f"\0{path.relative_to(self.folder).as_posix()}\0".encode())
            total.update(path.read_bytes())
        return total.hexdigest()

    def key(self, *parts: str) -> str:
        """Short name of one build of these sources with what `parts` say."""
        return hashlib.sha256("\0".join((self.digest, *parts)).encode()).hexdigest()[:20]
