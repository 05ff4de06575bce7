"""Types of configuration values: what users write (`"8"`, `5e8`, `"True"`, `torch.bfloat16`) becomes one Python type.

Each type is a pydantic `Annotated` with a converter that raises `ValueError("expected ...")`; the caller adds the path
and the value. Nothing is guessed: `1.5` is no integer and `true` is no number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainValidator

Dtype = Literal["fp32", "fp16", "bf16"]

_DTYPES: dict[str, Dtype] = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32",
    "fp16": "fp16", "float16": "fp16", "half": "fp16",
    "bf16": "bf16", "bfloat16": "bf16", "bfp16": "bf16",
}  # fmt: skip


class FrozenMap(Mapping[str, Any]):
    """A mapping of plain values that cannot be changed; lists inside are tuples, mappings inside are `FrozenMap`s."""

    __slots__ = ("_items",)
    _items: dict[str, Any]

    def __init__(self, items: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_items", {key: _freeze(value) for key, value in items.items()})

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a configuration cannot be changed")

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)

    def __reduce__(self) -> tuple[type[FrozenMap], tuple[dict[str, Any]]]:
        return FrozenMap, (dict(self._items),)


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return FrozenMap(value)
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item) for item in value)
    return value


def plain(value: Any) -> Any:
    """What was frozen, as dicts and lists."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def show(value: Any) -> str:
    """The value as it stands in a JSON file, shortened for a message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def plain_number(value: Any) -> int | float | None:
    """`value` as a number if it is one or a string that spells one; else None. Booleans are no numbers."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
        try:
            return float(value)
        except ValueError:
            return None
    return None


def plain_flag(value: Any) -> bool | None:
    """`value` as a boolean if it is one, 0, 1, or the word true or false in any case; else None."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        return {"true": True, "false": False, "1": True, "0": False}.get(value.strip().lower())
    return None


def _integer(minimum: int | None) -> Callable[[Any], int]:
    wanted = "an integer" if minimum is None else f"an integer of {minimum} or more"

    def convert(value: Any) -> int:
        number = plain_number(value)
        if isinstance(number, float):
            if not number.is_integer():
                raise ValueError(f"expected {wanted}")
            number = int(number)
        if number is None or (minimum is not None and number < minimum):
            raise ValueError(f"expected {wanted}")
        return number

    return convert


def _real(wanted: str, accept: Callable[[float], bool]) -> Callable[[Any], float]:
    def convert(value: Any) -> float:
        number = plain_number(value)
        if number is None or not math.isfinite(number) or not accept(float(number)):
            raise ValueError(f"expected {wanted}")
        return float(number)

    return convert


def _flag(value: Any) -> bool:
    flag = plain_flag(value)
    if flag is None:
        raise ValueError("expected true or false")
    return flag


def dtype_name(value: Any) -> Dtype:
    """The type that is spelled in one of several ways. Raises `ValueError` for any other."""
    name = str(value).strip().lower().removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError('expected one of "fp32", "fp16", "bf16"')
    return _DTYPES[name]


def _steps(value: Any) -> int | None:
    """Null and infinity both mean never."""
    number = plain_number(value)
    if value is None or number == math.inf:
        return None
    try:
        return _integer(1)(value)
    except ValueError:
        raise ValueError("expected an integer of 1 or more, or null or Infinity for never") from None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("expected a non-empty string")
    return value.strip()


def _strings(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise ValueError("expected a list of strings")
    return tuple(items)


def _mapping(value: Any) -> FrozenMap:
    if not isinstance(value, Mapping):
        raise ValueError("expected an object")
    return FrozenMap(value)


def choice(*names: str) -> BeforeValidator:
    """Accepts one of `names` in any case and gives it as spelled here."""
    by_lower = {name.lower(): name for name in names}

    def convert(value: Any) -> str:
        name = by_lower.get(str(value).lower()) if isinstance(value, str) else None
        if name is None:
            raise ValueError("expected one of " + ", ".join(f'"{name}"' for name in names))
        return name

    return BeforeValidator(convert)


Integer = Annotated[int, BeforeValidator(_integer(None))]
PositiveInteger = Annotated[int, BeforeValidator(_integer(1))]
Count = Annotated[int, BeforeValidator(_integer(0))]
PositiveReal = Annotated[float, BeforeValidator(_real("a finite number above 0", lambda x: x > 0))]
NonNegativeReal = Annotated[float, BeforeValidator(_real("a finite number of 0 or more", lambda x: x >= 0))]
Fraction = Annotated[float, BeforeValidator(_real("a number from 0 to 1", lambda x: 0 <= x <= 1))]
Flag = Annotated[bool, BeforeValidator(_flag)]
DtypeName = Annotated[Dtype, BeforeValidator(dtype_name)]
Steps = Annotated[int | None, PlainValidator(_steps)]
Text = Annotated[str, BeforeValidator(_text)]
Strings = Annotated[tuple[str, ...], BeforeValidator(_strings)]
Params = Annotated[FrozenMap, PlainValidator(_mapping)]

TYPE_WORDS: dict[Any, str] = {
    _flag: "true or false", dtype_name: "fp32, fp16 or bf16", _steps: "integer, null or Infinity",
    _text: "string", _strings: "list of strings", _mapping: "object",
}  # fmt: skip
