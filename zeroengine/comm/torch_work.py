"""torch's handle of an operation that a communicator runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work as TorchWork

from zeroengine.comm.lane import Operation
from zeroengine.errors import RankError


class BackendWork(TorchWork):
    """One or several operations, done when all are. `tensors`: the results."""

    def __init__(self, operations: Sequence[Operation], tensors: Sequence[Tensor], source: Sequence[int] = ()) -> None:
        """`source`: holds the rank that a receive from anywhere took its message from, once there is one."""
        super().__init__()
        self.operations = tuple(operations)
        self._tensors = list(tensors)
        self._source = source
        self._future: Any = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raises `RankError`, with the rank that is missing where that is known, and after `timeout` if there is one."""
        if timeout > timedelta(0):
            self._bounded(timeout.total_seconds())
        for operation in self.operations:
            operation.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(operation.done() for operation in self.operations)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        return next((o.error for o in self.operations if o.error is not None), None)

    def result(self) -> list[Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return self._source[0] if self._source else -1

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """A future of the list of results.

        Somebody has to look at the other ranks while it is awaited, and what a script hangs on it may wait for further operations: so
        it is completed in a thread of its own, unless the operation is over.
        """
        with self._lock:
            if self._future is None:
                begun: Any = torch.futures.Future()
                self._future = begun.then(self._outcome)  # an error in here is one for C++, too
                if self.is_completed():
                    begun.set_result(None)
                else:
                    threading.Thread(target=self._complete, args=(begun,), name="zeroengine future", daemon=True).start()
            return self._future

    def _complete(self, begun: Any) -> None:
        try:
            self.wait()
        except Exception:  # noqa: S110  # the operations keep it, and the future raises it
            pass
        begun.set_result(None)

    def _outcome(self, begun: Any) -> list[Tensor]:
        error = self.exception()
        if error is not None:
            raise error.with_traceback(None)
        return self._tensors

    def _bounded(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for operation in self.operations:
            if not operation.finished_within(max(0.0, deadline - time.monotonic())):
                raise RankError(f"{operation.describe()} did not end within {seconds:g} s, for which it was waited for")
