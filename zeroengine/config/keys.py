"""The one table of keys: typed fields, what is known of DeepSpeed besides, and how people misspell them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator, PlainValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from zeroengine.config.foreign import (
    COMPRESSED_PARAMS,
    FOREIGN,
    OLD_FORMS,
    OPTIMIZER_KERNELS,
    OPTIMIZER_PARAMS,
    RENAMED,
    SCHEDULER_PARAMS,
)
from zeroengine.config.spec import KeySpec, Kind, Mark, Section, other_than, switched_on
from zeroengine.config.values import TYPE_WORDS, FrozenMap, show

_COMMENT_KEY = re.compile(r"^(?:_|x-|//|#|\$)|^(?:comment|comments)$")


def is_comment(name: str) -> bool:
    """Keys that hold a remark or belong to someone else: `_…`, `x-…`, `//…`, `#…`, `$…`, `comment`."""
    return bool(_COMMENT_KEY.match(name))


class KeyTable(Mapping[str, KeySpec]):
    """All known keys by path, in the order of the documentation."""

    def __init__(self, root: type[Section]) -> None:
        self._rows = {row.path: row for row in [*_typed(root, ""), *_params(), *_old_forms(), *_foreign()]}
        self._canonical = {f"{row.parent}.{name}".lstrip("."): row.path for row in self._rows.values() for name in row.spellings}
        # A key below a section that is not read is no place to send anyone to, except from within that section.
        self._places = [path for path in [*self._rows, *self._canonical] if self._is_read(path)]
        self._by_name: dict[str, list[str]] = {}
        for path in self._places:
            self._by_name.setdefault(_folded(path.rpartition(".")[2]), []).append(path)

    def __getitem__(self, path: str) -> KeySpec:
        return self._rows[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def spellings(self) -> Mapping[str, str]:
        """Other spellings of typed keys, full path to canonical path."""
        return self._canonical

    def advice(self, path: str) -> str:
        """What to write in place of the unknown `path`."""
        section, _, name = path.rpartition(".")
        target = RENAMED.get(path) or RENAMED.get(_folded(name))
        if target is not None and target != path:
            return f"write `{target}`" if target in self._rows else target
        exact = self._by_name.get(_folded(name), [])
        same = [candidate for candidate in exact if candidate.rpartition(".")[0] == section]
        if same:
            return f"did you mean `{same[0]}`?"
        near = self._nearest(name, section, 0.75)
        if near is not None and len(exact) != 1:
            return f"did you mean `{near}`?"
        if 0 < len(exact) <= 4:
            places = " or ".join(_place(candidate) for candidate in exact)
            return f"`{_folded(name)}` belongs in {places}"
        anywhere = self._nearest(name, None, 0.8)
        if anywhere is not None:
            return f"did you mean `{anywhere}`?"
        nearest = near or self._nearest(name, section, 0.5)
        if nearest is not None:
            return f"the nearest key is `{nearest}`"
        known = [row.name for row in self._rows.values() if row.parent == section]
        if section and 0 < len(known) <= 12:
            return f"known keys of `{section}` are {', '.join(known)}"
        return "there is no similar key"

    def _is_read(self, path: str) -> bool:
        row = self._rows[self._canonical.get(path, path)]
        return row.kind is Kind.HONOURED or not row.parent or bool(row.meaning)

    def _nearest(self, name: str, section: str | None, cutoff: float) -> str | None:
        """The key with the most similar name in `section` (None: anywhere)."""
        paths = self._places
        if section is not None:
            paths = [path for path in [*self._rows, *self._canonical] if path.rpartition(".")[0] == section]
        by_name: dict[str, str] = {}
        for path in paths:
            by_name.setdefault(path.rpartition(".")[2], path)
        found = difflib.get_close_matches(_folded(name), by_name, n=1, cutoff=cutoff)
        return by_name[found[0]] if found else None


def _folded(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def _place(path: str) -> str:
    section = path.rpartition(".")[0]
    return f"`{section}` (`{path}`)" if section else "the top level"


def _typed(model: type[Section], prefix: str) -> Iterator[KeySpec]:
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        mark = extra.get("mark") if isinstance(extra, dict) else None
        if not isinstance(mark, Mark):
            raise TypeError(f"the field {model.__name__}.{name} is not made by key(), ignored() or refused()")
        child = _section_type(field.annotation)
        path = prefix + name
        yield KeySpec(
            path, mark.kind, field.description or "", "section" if child else _type_words(field), _default_words(field),
            mark.reason, mark.asks, section=child is not None or mark.open, open=mark.open, ours=mark.ours,
            spellings=mark.spellings,
        )  # fmt: skip
        if child is not None:
            yield from _typed(child, path + ".")


def _params() -> Iterator[KeySpec]:
    for section, names in (("optimizer", OPTIMIZER_PARAMS), ("scheduler", SCHEDULER_PARAMS)):
        for name in names:
            yield KeySpec(f"{section}.params.{name}", Kind.HONOURED, f"Given to the {section}.", "", "", open=True)
    yield KeySpec(
        "optimizer.params.fp32_optimizer_states", Kind.REFUSED, "Moments in fp32.",
        reason="moments stay in fp32, and fewer bits change the result; remove the key", asks=other_than(True),
    )  # fmt: skip
    for name in OPTIMIZER_KERNELS:
        why = "affects speed only, and is not given to the optimizer"
        yield KeySpec(f"optimizer.params.{name}", Kind.IGNORED, "Choice of a kernel.", reason=why, asks=switched_on)
    for name in COMPRESSED_PARAMS:
        why = "only the 1-bit optimizers know it, which approximate gradients; remove it"
        yield KeySpec(f"optimizer.params.{name}", Kind.REFUSED, "Of the 1-bit optimizers.", reason=why)
    yield KeySpec(
        "optimizer.params.max_grad_norm", Kind.REFUSED, "Clipping by the optimizer.", "",
        "", "clipping is done over all ranks by the engine: write `gradient_clipping` at the top level",
    )  # fmt: skip


def _old_forms() -> Iterator[KeySpec]:
    """Keys that become others before they are typed, see `canonical.py`."""
    for name, target in OLD_FORMS.items():
        meaning = f"Old form of `{target}.device: cpu`."
        yield KeySpec(f"zero_optimization.{name}", Kind.HONOURED, meaning, "true or false")


def _foreign() -> Iterator[KeySpec]:
    for entry in FOREIGN:
        yield from entry.rows()


def _section_type(annotation: Any) -> type[Section] | None:
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def _default_words(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=False)
    if field.default_factory is not None:
        return ""
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, int) and not isinstance(default, bool) and default >= 10**6:
        return f"{default:.0e}".replace("e+0", "e").replace("e+", "e")
    return show(default)


def _type_words(field: FieldInfo) -> str:
    annotation, metadata = field.annotation, list(field.metadata)
    optional = ""
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not NoneType]
        optional = " or null" if len(parts) < len(get_args(annotation)) else ""
        annotation = parts[0]
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        metadata += more
    for item in metadata:
        if isinstance(item, (BeforeValidator, PlainValidator)) and item.func in TYPE_WORDS:
            return TYPE_WORDS[item.func] + optional
    if get_origin(annotation) is Literal:
        return ", ".join(str(choice) for choice in get_args(annotation)) + optional
    words: dict[Any, str] = {int: "integer", float: "number", bool: "true or false", str: "string", FrozenMap: "object"}
    return words.get(annotation, "integer" if NoneType in get_args(annotation) else str(annotation)) + optional
