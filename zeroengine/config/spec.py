"""What the table of keys says about one key, and how a typed field carries it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from zeroengine.config.values import plain_flag, plain_number


class Kind(Enum):
    """What the engine does with a known key."""

    HONOURED = "honoured"
    IGNORED = "ignored"
    REFUSED = "refused"


def always(value: Any) -> bool:
    """Predicate of keys whose every value asks for something."""
    return True


def never(value: Any) -> bool:
    """Predicate of keys that can be passed over without a word, e.g. permissions that are always given."""
    return False


def switched_on(value: Any) -> bool:
    """A section asks for something when its `enabled` is true (absent means off), a plain value when it is true."""
    if isinstance(value, dict):
        return plain_flag(value.get("enabled", False)) is not False
    return value is not None and plain_flag(value) is not False


def switched_on_below(value: Any) -> bool:
    """A section asks for something when an `enabled` anywhere in it is true, unless its own `enabled` is false."""
    if not isinstance(value, dict):
        return switched_on(value)
    if "enabled" in value and plain_flag(value["enabled"]) is False:
        return False
    if "enabled" in value and not any(isinstance(child, dict) for child in value.values()):
        return True
    return any(switched_on_below(child) for child in value.values() if isinstance(child, dict))


def present(value: Any) -> bool:
    """A section asks for something when there is anything in it that is not switched off."""
    if isinstance(value, dict) and "enabled" in value:
        return switched_on(value)
    return value not in (None, False, {}, [], "") and plain_flag(value) is not False


def other_than(*values: Any) -> Callable[[Any], bool]:
    """A key asks for something unless it has one of `values`."""

    def predicate(value: Any) -> bool:
        if value in values:
            return False
        flag, number = plain_flag(value), plain_number(value)
        lower = value.lower() if isinstance(value, str) else None
        return not any(
            (flag is not None and isinstance(known, bool) and flag == known)
            or (number is not None and not isinstance(known, bool) and number == known)
            or (lower is not None and lower == known)
            for known in values
        )

    return predicate


@dataclass(frozen=True)
class KeySpec:
    """One row of the table of keys.

    `asks` tells whether a value asks for anything: only such values of an ignored key are warned about, and only such
    values of a refused key are refused. `open` sections accept any key below them.
    """

    path: str
    kind: Kind
    meaning: str
    type: str = ""
    default: str = ""
    reason: str = ""
    asks: Callable[[Any], bool] = always
    section: bool = False
    open: bool = False
    ours: bool = False
    spellings: tuple[str, ...] = ()

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class Mark:
    """What a typed field adds to its type, default and description; kept in the field's metadata."""

    kind: Kind = Kind.HONOURED
    reason: str = ""
    asks: Callable[[Any], bool] = always
    ours: bool = False
    spellings: tuple[str, ...] = ()
    open: bool = False


class Section(BaseModel):
    """Base of all sections: frozen, closed, compared by value."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)


def key(default: Any, meaning: str, *spellings: str, ours: bool = False, open_below: bool = False, factory: Any = None) -> Any:
    """A field that the engine honours. `spellings` are other names that DeepSpeed knows for it."""
    return _field(default, meaning, Mark(spellings=spellings, ours=ours, open=open_below), factory)


def ignored(
    default: Any,
    meaning: str,
    reason: str,
    *spellings: str,
    asks: Callable[[Any], bool] | None = None,
    open_below: bool = False,
) -> Any:
    """A field whose value cannot change the result and has no effect here. Its default is passed over silently."""
    mark = Mark(Kind.IGNORED, reason, asks or other_than(default), spellings=spellings, open=open_below)
    return _field(default, meaning, mark, None)


def refused(default: Any, meaning: str, reason: str, asks: Callable[[Any], bool] | None = None, *, open_below: bool = False) -> Any:
    """A field which, switched on, would change the result. Its default is accepted."""
    mark = Mark(Kind.REFUSED, reason, asks or other_than(default, None), open=open_below)
    return _field(default, meaning, mark, None)


def _field(default: Any, meaning: str, mark: Mark, factory: Any) -> Any:
    extra: dict[str, Any] = {"mark": mark}
    if factory is not None:
        return Field(default_factory=factory, description=meaning, json_schema_extra=extra)
    return Field(default, description=meaning, json_schema_extra=extra)
