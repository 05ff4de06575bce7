"""The examples' data code by itself: pairs of a library, the user's files, the split, tokenizing and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stdlib_pairs import documented_functions, stdlib_pairs
from text_data import (
    IGNORED,
    BadInput,
    Collate,
    Example,
    Pair,
    count_targets,
    read_pairs,
    split_by_group,
    tokenize,
)

MODULE = '''# Copyright: a licence comment that belongs to no function.
import os


@os.cached
def first(x):
    """Say what first does.

    In two paragraphs.
    """
    # a comment that explains the code
    return x


class C:
    def second(self):
        "One line."
        return 2

    def undocumented(self):
        return 3

    def only_documented(self):
        """Nothing else."""

    async def third(self): "on the line of its def"; return 1
'''


class Letters:
    """A tokenizer of one token a character, with a token 1 before every prompt."""

    eos_token_id = 2

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1] * add_special_tokens + [ord(c) for c in text] for text in texts]}


def test_functions_are_read_without_their_docstrings() -> None:
    found = list(documented_functions(MODULE))
    assert found == [
        (
            "@os.cached\ndef first(x):\n    # a comment that explains the code\n    return x",
            "Say what first does.\n\nIn two paragraphs.",
        ),
        ("def second(self):\n    return 2", "One line."),
    ]


def test_library_pairs_are_unique_ordered_and_grouped(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text(MODULE)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text('def f(y):\n    "Other."\n    return y\n')
    (tmp_path / "a" / "y.py").write_text('def f(y):\n    "Same source, other words."\n    return y\n')
    (tmp_path / "c.py").write_text('def g(y):\n    "Other."\n    return y + 1\n')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.py").write_text('def h(y):\n    "In a test."\n    return y + 2\n')
    (tmp_path / "broken.py").write_text("def (")
    pairs = stdlib_pairs(tmp_path)
    assert [(pair.group, pair.completion) for pair in pairs] == [
        ("a", "Other."),
        ("b", "Say what first does.\n\nIn two paragraphs."),
        ("b", "One line."),
    ]
    assert all(pair.completion not in pair.prompt for pair in pairs)


def test_python_itself_gives_enough_pairs_and_no_leak() -> None:
    pairs = stdlib_pairs()
    train, held_out = split_by_group(pairs)
    assert len(pairs) > 3000
    assert 0.05 < len(held_out) / len(pairs) <= 0.1
    assert not {pair.group for pair in train} & {pair.group for pair in held_out}
    assert not {pair.completion for pair in train} & {pair.completion for pair in held_out}


@pytest.mark.parametrize("sizes", [[1, 1], [50, 2], [5, 5, 5, 1, 1, 1, 1, 1]])
def test_both_sides_of_a_split_are_filled(sizes: list[int]) -> None:
    pairs = [Pair("", str(i), f"group {g}") for g, size in enumerate(sizes) for i in range(size)]
    train, held_out = split_by_group(pairs)
    assert train and held_out and len(train) >= len(held_out)
    assert sorted(p.completion for p in train + held_out) == sorted(p.completion for p in pairs)
    assert split_by_group(list(reversed(pairs)))[1] == list(reversed(held_out))


def test_pairs_learn_their_completion_and_text_learns_itself() -> None:
    pairs = [Pair("ab", "c", ""), Pair("abcdefgh", "i", ""), Pair("", "vwxyz", "")]
    examples, too_long = tokenize(pairs, Letters(), max_length=5)
    a, b, c = map(ord, "abc")
    assert too_long == 1
    assert examples[0] == Example([1, a, b, c, 2], [IGNORED, IGNORED, IGNORED, c, 2])
    assert [example.ids for example in examples[1:]] == [[1, *map(ord, "vwxy")], [ord("z"), 2]]
    assert all(example.labels == example.ids for example in examples[1:])
    assert examples[0].prompt() == [1, a, b]
    assert examples[1].prompt() == [1, ord("v")]


def test_a_batch_is_padded_and_counted() -> None:
    batch = Collate(pad_id=9)([Example([1, 2, 3], [IGNORED, 2, 3]), Example([4, 5], [4, 5])])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[IGNORED, 2, 3], [4, 5, IGNORED]]
    assert count_targets(batch) == 3  # the first label of the second row has nothing before it
    assert count_targets(Collate(9)([Example([4, 5], [4, 5]).silent()])) == 0


BAD_FILES: list[tuple[str, Any, str]] = [
    ("none.jsonl", None, "no such file"),
    ("data.csv", "a,b", "must end in .jsonl or .txt"),
    ("empty.jsonl", " \n", "is empty"),
    ("empty.txt", "", "is empty"),
    ("latin.txt", b"\xe9t\xe9", "not UTF-8"),
    ("broken.jsonl", '{"text": "a"}\n\n{"text": \n', "line 3: not JSON"),
    ("list.jsonl", "[1]", "line 1: a JSON object is needed, not list"),
    ("keys.jsonl", '{"question": "a", "answer": "b"}', "line 1: needs the keys"),
    ("half.jsonl", '{"text": "a"}\n{"prompt": "b"}', 'line 2: the key "completion" is missing'),
    ("number.jsonl", '{"prompt": 1, "completion": "b"}', 'line 1: "prompt" must be a string, not int'),
    ("blank.jsonl", '{"prompt": "a", "completion": " "}', 'line 1: "completion" is empty'),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES, ids=[name for name, _, _ in BAD_FILES])
def test_bad_files_are_refused_with_one_line(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInput, match=message) as caught:
        read_pairs(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_are_split(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("0123456789" * 10)
    train, held_out = read_pairs(text)
    assert (train[0].completion, held_out[0].completion) == ("0123456789" * 9, "0123456789")
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"prompt": "a", "completion": "1"}\n{"prompt": "a", "completion": "2"}\n{"text": "b\\u2028c"}\n')
    train, held_out = read_pairs(lines)
    assert {p.completion for p in train + held_out} == {"1", "2", "b\u2028c"}
    assert {p.group for p in train}.isdisjoint(p.group for p in held_out)
