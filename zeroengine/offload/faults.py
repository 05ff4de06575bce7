"""An error of one rank's disk becomes the error of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from zeroengine.comm.protocol import Communicator
from zeroengine.errors import OffloadError, ZeroEngineError
from zeroengine.logging import logger

_LONGEST = 2000  # bytes of an error's text that travel


class Faults:
    """Keeps the first `OffloadError` of work that must go on for the other ranks' sake, until they agree on it."""

    def __init__(self) -> None:
        self.first: OffloadError | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Context of one piece of such work."""
        try:
            yield
        except OffloadError as error:
            self.keep(error)

    def keep(self, error: OffloadError) -> None:
        if self.first is None:
            self.first = error
            logger.error("%s", error)

    def note(self, text: str) -> None:
        """Keeps what is wrong without an exception."""
        self.first = self.first or OffloadError(text)

    def agree(self, control: Communicator, doing: str, remedy: str = "", kind: type[ZeroEngineError] = OffloadError) -> None:
        """Raises an error of `kind` on all ranks, with what each of them met, if any rank kept one. Collective. `remedy`: what to
        do beside what the errors say."""
        error, self.first = self.first, None
        text = b"" if error is None else str(error).encode()[:_LONGEST]
        lengths = control.exchange(torch.tensor([len(text)]), doing).flatten().tolist()
        if not max(lengths):
            return
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        rows = control.exchange(padded, f"{doing}: errors").tolist()
        told = [bytes(row[:n]).decode("utf-8", "replace") for row, n in zip(rows, lengths, strict=True) if n]
        raise kind(f"{doing}: " + "; ".join(told) + (f". {remedy}" if remedy else "")) from error
