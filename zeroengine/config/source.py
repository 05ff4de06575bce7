"""Where a configuration comes from: a file, a text, base64 of a text, or a mapping."""

from __future__ import annotations

import base64
import binascii
import copy
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroengine.config.text import parse
from zeroengine.errors import ConfigError

_BASE64 = re.compile(r"[A-Za-z0-9_\-]{16,}={0,2}$")


@dataclass(frozen=True)
class Source:
    """What was read, and the name that messages use for it."""

    values: dict[str, Any]
    origin: str


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> Source:
    """Reads a path, a text with an object in it, URL-safe base64 of such a text, or a mapping (copied).

    Raises `ConfigError` if the file is missing or not readable, or the text is not an object.
    """
    if isinstance(source, Mapping):
        return Source(_copied(source), "config")
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"a configuration is a path, a JSON text, a dict or a Config, not {type(source).__name__}: {source!r:.60}")
    text = os.fspath(source)
    if "{" in text or "\n" in text:
        return Source(parse(text, "config text"), "config text")
    path = Path(text).expanduser()
    if path.is_file():
        return Source(parse(_content(path), str(path)), str(path))
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; give the JSON file in it")
    decoded = _decoded(text)
    if decoded is not None:
        return Source(parse(decoded, "base64 config"), "base64 config")
    raise ConfigError(f"configuration file {text} does not exist (current directory: {Path.cwd()})")


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _decoded(text: str) -> str | None:
    if not _BASE64.match(text):
        return None
    try:
        decoded = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return decoded if "{" in decoded or ":" in decoded else None


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise ConfigError(f"keys of a configuration are strings, not {type(key).__name__}: {key!r}")
        result[key] = _copied(value) if isinstance(value, Mapping) else copy.deepcopy(value)
    return result
