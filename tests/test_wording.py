"""Words of messages, and sizes as people write them."""

from __future__ import annotations

import pytest

from zeroengine.wording import bytes_of, first_line, listed


def test_a_list_says_how_many_are_left_out() -> None:
    assert (listed([]), listed(["a", "b"]), listed(["a", "b", "c"], 2, "; ")) == ("", "a, b", "a; b and 1 more")


def test_the_line_of_an_error_that_tells() -> None:
    assert first_line(ValueError("\n why \nmore"), 2) == "wh" and first_line(ValueError()) == "ValueError"


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("80GB", 80 * 10**9), (" 1.5 kib ", 1536), ("2e3", 2000), ("1TiB", 2**40), ("0", None), ("-1GB", None), ("infGB", None),
     ("nan", None), ("5XB", None), ("", None)],
)  # fmt: skip
def test_sizes(text: str, size: int | None) -> None:
    assert bytes_of(text) == size
