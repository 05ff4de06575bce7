"""Command lines: a parser that raises the package's error, and types of arguments."""

from __future__ import annotations

import argparse
from typing import NoReturn

from zeroengine.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` in place of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} ({self.prog} --help lists the options)")


def positive(text: str) -> int:
    """A whole number above 0."""
    number = int(text) if text.strip().isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def positive_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers above 0, separated by commas."""
    return tuple(map(positive, text.split(",")))
