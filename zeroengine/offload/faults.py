"""An error of one rank's disk becomes the error of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zeroengine.comm.protocol import Communicator
from zeroengine.comm.texts import exchange_texts
from zeroengine.errors import OffloadError, ZeroEngineError
from zeroengine.logging import logger

_LONGEST = 2000  # characters of an error's text that travel


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
        texts = exchange_texts(control, "" if error is None else str(error)[:_LONGEST], f"errors of {doing}")
        told = [text for text in texts if text]
        if told:
            raise kind(f"{doing}: " + "; ".join(told) + (f". {remedy}" if remedy else "")) from error
