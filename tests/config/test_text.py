"""The reader of JSON as users write it."""

from __future__ import annotations

import base64
import json
import math

import pytest

from zeroengine.config.source import read
from zeroengine.config.text import parse
from zeroengine.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1, "b": [1, 2.5e3, null]}', {"a": 1, "b": [1, 2500.0, None]}),
        ('{"a": 1, // one\n "b": 2, # two\n /* three\n lines */ "c": 3,}', {"a": 1, "b": 2, "c": 3}),
        ('{"a": [1, 2,],\n "b": {"c": 1,},}', {"a": [1, 2], "b": {"c": 1}}),
        ('"a": 1,\n"b": {"c": true}\n', {"a": 1, "b": {"c": True}}),
        ('{"a": {"x": 1}\n "b": 2}', {"a": {"x": 1}, "b": 2}),
        ("{a: 1\n b: True, c: None, 'd': 'it\\'s \"so\"'}", {"a": 1, "b": True, "c": None, "d": 'it\'s "so"'}),
        ("{a: /data/run-1 # where\n b: http://host:80/x, c: hello world}",
         {"a": "/data/run-1", "b": "http://host:80/x", "c": "hello world"}),
        ('{"n": SIZE, "e": -1e-8, "i": +5, "f": .5}', {"n": "SIZE", "e": -1e-8, "i": 5, "f": 0.5}),
        ('{"a": "x // not a comment", "b": "#"}', {"a": "x // not a comment", "b": "#"}),
        ('{"a": "\\u00e9\\n"}', {"a": "é\n"}),
    ],
)  # fmt: skip
def test_reads_what_users_write(text: str, expected: dict[str, object]) -> None:
    assert parse(text, "t") == expected


def test_infinity_and_types() -> None:
    values = parse("{a: Infinity, b: -Infinity, c: 5e8, d: 500000000}", "t")
    assert values["a"] == math.inf and values["b"] == -math.inf
    assert isinstance(values["c"], float) and isinstance(values["d"], int)


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ('{"a": 1,\n "a": 2}', "line 2, column 2", "`a` is given twice (first on line 1)"),
        ('{"z": {"s": 1, "s": 1}}', "line 1, column 16", "`z.s` is given twice"),
        ('{"a": 1}\n```', "line 2, column 1", "after the end"),
        ('{"a": 1', "line 1, column 8", "the file ends"),
        ('{"a": 1 "b": 2}', "line 1, column 7", "comma"),
        ('{"a": {"x": 1} "b": 2}', "line 1, column 16", "expected `,`"),
        ('{"a"\n 1}', "line 2, column 2", "expected `:`"),
        ('{"a": }', "line 1, column 7", "expected a value"),
        ('{"a": "x\n"}', "line 1, column 9", "control character"),
        ("{'a: 1}", "line 1, column 2", "does not end"),
        ("[1]", "line 1, column 1", "not list"),
        ("/* open {", "line 1, column 1", "not closed"),
        ("  \n# nothing\n", "line 3, column 1", "empty"),
        ('{"a":' * 200 + "1" + "}" * 200, "line 1", "twice|deeply"),
        ("{a: [" + "[" * 100 + "]" * 101 + "}", "line 1", "deeply"),
    ],
)  # fmt: skip
def test_errors_name_line_and_column(text: str, where: str, what: str) -> None:
    if "deeply" in what:
        text = text.replace('"a":', "a:")
    with pytest.raises(ConfigError) as caught:
        parse(text, "file.json")
    assert str(caught.value).startswith(f"file.json: {where}")
    assert any(part in str(caught.value) for part in what.split("|"))


def test_sources(tmp_path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('\ufeff{"steps_per_print": 7}', encoding="utf-8")
    assert read(file).values == read(str(file)).values == {"steps_per_print": 7}
    assert read(str(file)).origin == str(file)
    encoded = base64.urlsafe_b64encode(json.dumps({"steps_per_print": 7}).encode()).decode()
    assert read(encoded).values == {"steps_per_print": 7}
    given = {"optimizer": {"params": {"betas": [0.9, 0.99]}}}
    copied = read(given)
    copied.values["optimizer"]["params"]["betas"].append(1)
    assert given["optimizer"]["params"]["betas"] == [0.9, 0.99]


@pytest.mark.parametrize(
    ("source", "what"),
    [("/no/such/file.json", "does not exist"), (".", "is a directory"), (7, "not int"), ({1: 2}, "keys .* strings")],
)
def test_missing_and_wrong_sources(source, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        read(source)


def test_not_utf8(tmp_path) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="not UTF-8"):
        read(file)
