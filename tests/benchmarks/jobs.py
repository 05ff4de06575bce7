"""Jobs for `benchmarks.worker` that need no torch."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from benchmarks.errors import Unavailable


class Echo:
    def __init__(self, value: int):
        self.value = value

    def ready(self) -> dict[str, Any]:
        sys.stdout.write("a library that prints\n")
        return {"pid": os.getpid()}

    def turn(self, add: int) -> dict[str, Any]:
        self.value += add
        return {"value": self.value, "rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"])}


class Bad(Echo):
    """Goes wrong in a turn, in the way that it is told."""

    def turn(self, add: int, how: str = "", rank: int = 0) -> dict[str, Any]:
        if int(os.environ["RANK"]) == rank:
            if how == "raise":
                raise ValueError("subject and remedy")
            if how == "exit":
                sys.stderr.write("last words\n")
                sys.stderr.flush()
                os._exit(7)
            if how == "hang":
                time.sleep(60)
        return super().turn(add)


class Missing(Echo):
    def __init__(self, value: int):
        super().__init__(value)
        raise Unavailable("not installed here")
