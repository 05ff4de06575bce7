"""Folders that are a complete checkpoint or are not one: written beside, marked, renamed; `latest` moves last.

    <directory>/latest                        the tag of the checkpoint to resume from
    <directory>/<tag>/                        a complete checkpoint, e.g. global_step100
    <directory>/<tag>/.metadata, *.distcp     the tensors, as torch.distributed.checkpoint writes them
    <directory>/<tag>/replicated.pt           Python values that are the same on all ranks
    <directory>/<tag>/rank_<r>.pt             Python values of one rank
    <directory>/<tag>/complete.json           written last: format, ranks, names, sizes and checksums of all files
    <directory>/.<tag>.saving-<host>-<pid>-…  a save in progress, or what a killed one left
    <directory>/.latest-<pid>                 the next `latest`, for the moment before it is renamed
    <directory>/.<tag>.old-<host>-<pid>-…     the former holder of a tag, for the moment of its replacement

A rename makes a folder appear whole. Replacing a tag takes two renames, and a crash between them leaves the complete
content under a hidden name only; the search therefore looks at hidden folders too. One job saves into a directory at
a time.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeroengine.checkpoint.storage import METADATA, FileSum, sync_folder, write_file
from zeroengine.errors import CheckpointError
from zeroengine.logging import logger

MARKER = "complete.json"
LATEST = "latest"
REPLICATED = "replicated.pt"
FORMAT = 1
SHOWN = 20  # names in a message
_HIDDEN = re.compile(r"\.(?P<tag>.+)\.(?P<kind>saving|old)-(?P<host>[^-]+)-(?P<pid>\d+)-[0-9a-f]+")


@dataclass(frozen=True)
class Marker:
    """What `complete.json` says. `files` maps file names to (bytes, CRC-32); `saved_at` is Unix time in nanoseconds."""

    format: int
    world: int
    saved_at: int
    torch: str
    zeroengine: str
    files: dict[str, FileSum]


def check_tag(tag: str) -> None:
    """Raises CheckpointError unless `tag` can name a folder of its own inside the checkpoint directory."""
    if not tag or tag.startswith(".") or "/" in tag or "\\" in tag or "\0" in tag or tag == LATEST:
        raise CheckpointError(
            f"{tag!r} cannot be the tag of a checkpoint: it must be the name of a folder, without a separator, "
            f"without a leading dot and other than {LATEST!r}"
        )


def read_marker(folder: Path) -> Marker:
    """Reads the marker and checks that every file is there in full length (contents: see the checksums).

    Raises CheckpointError that says what is wrong with the folder.
    """
    path = folder / MARKER
    try:
        fields: dict[str, Any] = json.loads(path.read_text("utf-8"))
        marker = Marker(**{**fields, "files": {name: (int(s), int(c)) for name, (s, c) in fields["files"].items()}})
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MARKER}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {MARKER} is damaged ({exc})") from exc
    if marker.format > FORMAT:
        raise CheckpointError(
            f"{folder} was written in format {marker.format} by zeroengine {marker.zeroengine}; this version "
            f"reads up to {FORMAT}: update zeroengine"
        )
    for name, (size, _) in marker.files.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is not a complete checkpoint: the file {name} is missing") from None
        if found != size:
            raise CheckpointError(f"{folder} is not a complete checkpoint: {name} has {found} bytes instead of {size}")
    return marker


def begin(final: Path) -> Path:
    """Makes the hidden folder in which the checkpoint `final` is written, and removes what killed saves left."""
    check_tag(final.name)
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists() and not _replaceable(final):
        raise CheckpointError(f"{final} exists and is not a checkpoint, so it is not replaced: choose another tag or remove it")
    for hidden, tag in _hidden(final.parent):
        if tag == final.name or _writer_is_gone(hidden):
            _clear(hidden, final.parent / tag)
    for pointer in final.parent.glob(f".{LATEST}-*"):  # of a save that was killed right before it moved `latest`
        pointer.unlink(missing_ok=True)
    saving = _beside(final, "saving")
    saving.mkdir()
    return saving


def _clear(hidden: Path, final: Path) -> None:
    """Removes what a killed save left. If a crash between the two renames made it its tag's only copy, restores it."""
    if not _is_complete(hidden) or _is_complete(final):
        shutil.rmtree(hidden, ignore_errors=True)
    elif not final.exists():
        hidden.rename(final)


def commit(saving: Path, final: Path, marker: Marker, *, latest: bool) -> None:
    """Makes the written folder `saving` the checkpoint `final`, then, if `latest`, what a resume starts from."""
    sync_folder(saving)
    write_file(saving / MARKER, json.dumps(asdict(marker), indent=1).encode("utf-8"))
    sync_folder(saving)
    old: Path | None = None
    if final.exists():
        old = _beside(final, "old")
        final.rename(old)
    try:
        saving.rename(final)
    except OSError:
        if old is not None:
            old.rename(final)
        raise
    sync_folder(final.parent)
    if latest:
        write_latest(final.parent, final.name)
    for hidden, tag in _hidden(final.parent):
        if tag == final.name:
            shutil.rmtree(hidden, ignore_errors=True)


def prune(directory: Path, keep: int, newest: str) -> None:
    """Removes complete checkpoints so that `keep` are left: `newest`, the one `latest` names, then by age.

    What cannot be removed is left with a warning: the checkpoint that was just saved is not at fault.
    """
    safe = {newest, _read_latest(directory)}
    others = [tag for tag in complete_tags(directory) if tag not in safe and (directory / tag).is_dir()]
    for tag in others[max(keep - len(safe - {None}), 0) :]:
        going = _beside(directory / tag, "old")
        try:
            (directory / tag).rename(going)
            (going / MARKER).unlink()  # from here on it is no checkpoint that an interrupted removal could bring back
            shutil.rmtree(going)
        except OSError as exc:
            logger.warning("the old checkpoint %s is not removed: %s", directory / tag, exc)


def write_latest(directory: Path, tag: str) -> None:
    """Points `latest` to `tag`, in one step and durably."""
    check_tag(tag)
    fresh = directory / f".{LATEST}-{os.getpid()}"
    try:
        write_file(fresh, tag.encode("utf-8"))
        fresh.replace(directory / LATEST)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(directory)


def discard(saving: Path) -> None:
    """Removes a save that failed. What cannot be removed is hidden, and the next save tries again."""
    shutil.rmtree(saving, ignore_errors=True)


def find(directory: Path, tag: str | None) -> Path | None:
    """The folder to load: that of `tag`, else the one `latest` names, else the newest complete one.

    A named tag must be complete. Without one, what is broken is skipped with a warning, and None means that nothing was
    ever saved here. Raises CheckpointError if the tag is missing or broken, or if only broken checkpoints are left.
    """
    if tag is not None:
        check_tag(tag)
        return _of_tag(directory, tag)
    for hidden, left in _hidden(directory):
        if not _is_complete(hidden):
            logger.warning("skipping %s: the save of %s was interrupted (or goes on right now)", hidden, left)
    broken: list[str] = []
    named = _read_latest(directory)
    if named is not None:
        try:
            return _of_tag(directory, named)
        except CheckpointError as exc:
            broken.append(str(exc))
    complete: list[tuple[int, Path]] = []
    for folder in _candidates(directory):
        try:
            complete.append((read_marker(folder).saved_at, folder))
        except CheckpointError as exc:
            if not folder.name.startswith("."):
                broken.append(str(exc))
    reasons = "; ".join(dict.fromkeys(broken))
    if not complete:
        if not broken:
            return None
        raise CheckpointError(f"no complete checkpoint in {directory}: {reasons}")
    newest = max(complete)[1]
    reasons = reasons or f"{directory} has no file {LATEST!r}"
    logger.warning("loading %s, the newest complete checkpoint, because %s", newest, reasons)
    return newest


def complete_tags(directory: Path) -> list[str]:
    """Tags of the complete checkpoints in `directory`, newest first."""
    found = [(read_marker(folder).saved_at, folder.name) for folder in _candidates(directory) if _is_complete(folder)]
    return list(dict.fromkeys(tag_of(name) for _, name in sorted(found, reverse=True)))


def tag_of(name: str) -> str:
    """The tag of a folder of this name, hidden or not."""
    hidden = _HIDDEN.fullmatch(name)
    return hidden["tag"] if hidden else name


def rank_file(rank: int) -> str:
    """Name of the file with the values that `rank` kept for itself."""
    return f"rank_{rank:05d}.pt"


def now() -> int:
    """Nanoseconds of Unix time, by which checkpoints are ordered."""
    return time.time_ns()


def _of_tag(directory: Path, tag: str) -> Path:
    final = directory / tag
    try:
        read_marker(final)
        return final
    except CheckpointError as exc:
        hidden = [(read_marker(f).saved_at, f) for f, t in _hidden(directory) if t == tag and _is_complete(f)]
        if hidden:
            return max(hidden)[1]
        others = [t for t in complete_tags(directory) if t != tag]
        known = f"complete ones: {', '.join(others)}" if others else "there is no complete one"
        reason = str(exc) if final.exists() else f"{final} does not exist"
        raise CheckpointError(f"{reason} ({known})") from exc


def _read_latest(directory: Path) -> str | None:
    try:
        tag = (directory / LATEST).read_text("utf-8").strip()
    except FileNotFoundError:
        return None
    except (UnicodeDecodeError, IsADirectoryError) as exc:
        logger.warning("%s is not readable (%s) and is ignored", directory / LATEST, exc)
        return None
    try:
        check_tag(tag)
    except CheckpointError as exc:
        logger.warning("%s is ignored: %s", directory / LATEST, exc)
        return None
    return tag


def _candidates(directory: Path) -> list[Path]:
    """Folders that are checkpoints or look like remains of one."""
    try:
        entries = sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [e for e in entries if e.is_dir() and (_HIDDEN.fullmatch(e.name) or _looks_like_checkpoint(e))]


def _looks_like_checkpoint(folder: Path) -> bool:
    return (folder / MARKER).exists() or (folder / METADATA).exists() or any(folder.glob("*.distcp"))


def _replaceable(final: Path) -> bool:
    return final.is_dir() and (_looks_like_checkpoint(final) or not any(final.iterdir()))


def _is_complete(folder: Path) -> bool:
    try:
        read_marker(folder)
    except CheckpointError:
        return False
    return True


def _hidden(directory: Path) -> list[tuple[Path, str]]:
    try:
        entries = sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [(e, m["tag"]) for e in entries if (m := _HIDDEN.fullmatch(e.name))]


def _beside(final: Path, kind: str) -> Path:
    return final.parent / f".{final.name}.{kind}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def _host() -> str:
    return socket.gethostname().replace("-", "_").replace("/", "_")


def _writer_is_gone(hidden: Path) -> bool:
    """Whether the process that made the folder is known to have ended. On another host it cannot be known."""
    match = _HIDDEN.fullmatch(hidden.name)
    if match is None or match["host"] != _host():
        return False
    try:
        os.kill(int(match["pid"]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
