"""Work and values of all ranks of a group, and steps that all of them take."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from zeroengine import errors
from zeroengine.comm.protocol import Communicator
from zeroengine.comm.texts import exchange_bytes
from zeroengine.errors import ConfigError, DivergenceError, RankError, ZeroEngineError

T = TypeVar("T")


def exchange_values(control: Communicator, subject: str, value: Any) -> list[Any]:
    """Values of all ranks of `control`, in their order. Collective."""
    return [pickle.loads(data) for data in exchange_bytes(control, pickle.dumps(value), subject)]


def together(control: Communicator, doing: str, work: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
    """Runs `work` on every rank of `control`: if it fails on any, the first one's error is raised on all, and the others `undo` what
    they made. An error of somebody else's library is a `ConfigError`. Collective."""
    error: ZeroEngineError | None = None
    cause: Exception | None = None
    try:
        made = work()
    except ZeroEngineError as raised:
        error = cause = raised
    except Exception as raised:
        error, cause = ConfigError(f"{doing}: {type(raised).__name__}: {raised}"), raised
    kind = next((c.__name__ for c in type(error).__mro__ if hasattr(errors, c.__name__)), "")  # of a subclass: what all ranks know
    told = exchange_values(control, doing, None if error is None else (kind, str(error)))
    first = next((one for one in told if one is not None), None)
    if first is None:
        return made
    if error is None and undo is not None:
        undo(made)
    raise getattr(errors, first[0])(first[1]) from cause


def in_turn(*steps: Callable[[], object]) -> None:
    """Runs all `steps`, also after one that fails, and raises the first error then. Where a rank is gone, no other follows: they
    would wait for it."""
    first: Exception | None = None
    for step in steps:
        try:
            step()
        except Exception as error:
            first = first or error
            if isinstance(error, RankError) and not isinstance(error, DivergenceError):
                break
    if first is not None:
        raise first
