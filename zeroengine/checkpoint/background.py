"""Saving while training goes on: a copy of what this rank writes, and a thread that writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroengine.checkpoint.ranks import Ranks, describe
from zeroengine.checkpoint.saving import Saver
from zeroengine.checkpoint.staging import StagingMemory
from zeroengine.errors import CheckpointError
from zeroengine.logging import logger
from zeroengine.ops.aio import copy_away
from zeroengine.zero.layout import Piece


class BackgroundSaver:
    """Saves one checkpoint at a time in a thread of its own, over a process group of its own.

    The thread is no daemon: a process that ends waits for its save. An error is logged where it happens, and raised by the
    next `wait` or `start`. The memory that a save is copied to is kept for the next one, see `StagingMemory`.
    """

    def __init__(self) -> None:
        self._group: ProcessGroup | None = None
        self._memory = StagingMemory()
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._error: BaseException | None = None

    def start(
        self,
        folder: Path,
        tensors: Mapping[str, Sequence[Piece]],
        replicated: Mapping[str, Any],
        per_rank: Mapping[str, Any],
        *,
        latest: bool = True,
        keep_last: int | None = None,
        later: Callable[[str], bool] = lambda key: False,
    ) -> None:
        """Copies `tensors` to host memory and returns; the rest is `zeroengine.checkpoint.save` over the default group's ranks.
        Of the keys that `later` says, what lies in host memory is copied in the thread, too: it must not change before `staged`
        returns. Collective. Waits for the save before. Raises CheckpointError on all ranks if the values cannot be saved."""
        self.wait()
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if self._group is None and world > 1:
            self._group = dist.new_group(backend="gloo")
        saver = Saver(Path(folder), Ranks(self._group, rank, world), latest=latest, keep_last=keep_last)
        copies, rest = self._memory.stage(tensors, later)
        saver.prepare(copies, replicated, per_rank)
        self._copied.clear()
        self._thread = threading.Thread(target=self._run, args=(saver, rest), name=f"zeroengine {saver.doing}", daemon=False)
        self._thread.start()

    def staged(self) -> None:
        """Returns when the values of the save under way, if there is one, are copied and may change."""
        if self._thread is not None:
            self._copied.wait()

    def _run(self, saver: Saver, rest: list[tuple[Tensor, Tensor]]) -> None:
        try:
            self._copy(rest)
            saver.run()
        except BaseException as exc:  # handed to the training thread
            self._error = exc
            logger.error("in the background: %s", describe(exc))
        finally:
            saver.forget()
            self._memory.release()

    def _copy(self, rest: list[tuple[Tensor, Tensor]]) -> None:
        try:
            for target, source in rest:
                copy_away(target, source)
        finally:
            rest.clear()
            self._copied.set()

    def wait(self) -> None:
        """Returns when the save under way is complete. Raises its error, once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise CheckpointError(f"a save in the background failed: {error}") from error
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits and gives the process group and the memory back. Collective."""
        try:
            self.wait()
        finally:
            self._memory.close()
            group, self._group = self._group, None
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
