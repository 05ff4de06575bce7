"""Words of messages, and sizes as people write them."""

from __future__ import annotations

import pytest

from zeroengine.wording import bytes_of, first_line, listed, size


def test_a_list_says_how_many_are_left_out() -> None:
    assert (listed([]), listed(["a", "b"]), listed(["a", "b", "c"], 2, "; ")) == ("", "a, b", "a; b and 1 more")


def test_the_line_of_an_error_that_tells() -> None:
    assert first_line(ValueError("\n why \nmore"), 2) == "wh" and first_line(ValueError()) == "ValueError"


@pytest.mark.parametrize(("nbytes", "text"), [(1, "1 B"), (1500, "1.5 kB"), (97.37e6, "97.4 MB"), (80e9, "80.0 GB"), (2.5e12, "2.5 TB")])
def test_sizes_as_written(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("512", 512), ("80GB", 80 * 10**9), (" 1.5 kib ", 1536), ("2e3", 2000), ("1TiB", 2**40), ("0", None), ("-1GB", None), ("infGB", None),
     ("nan", None), ("5XB", None), ("", None)],
)  # fmt: skip
def test_sizes_as_read(text: str, nbytes: int | None) -> None:
    assert bytes_of(text) == nbytes
