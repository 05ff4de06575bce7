"""Phases that all ranks leave together: either all with a result, or all with the same error."""

from __future__ import annotations

import errno
import socket
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import CheckpointException

from zeroengine.errors import CheckpointError, RankError, ZeroEngineError
from zeroengine.wording import first_line

T = TypeVar("T")

_REMEDIES = {
    errno.ENOSPC: "free some space there or choose another folder",
    errno.EDQUOT: "the quota is used up: free some space there or choose another folder",
    errno.EACCES: "make the folder accessible to this user or choose another one",
    errno.EPERM: "make the folder accessible to this user or choose another one",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.ENOTDIR: "a part of the path is a file: choose another folder",
    errno.EEXIST: "a file is in the way: choose another folder",
}


class Ranks:
    """The ranks that save or load one checkpoint together.

    `process_group` is a group on the CPU (Gloo), or None for the default group; `rank` and `world` are this rank's
    place in it and its size. One process needs no group at all.
    """

    def __init__(self, process_group: ProcessGroup | None, rank: int, world: int) -> None:
        if not 0 <= rank < world:
            raise CheckpointError(f"rank {rank} does not lie in a world of {world}")
        if world > 1:
            if not dist.is_initialized():
                raise CheckpointError(f"rank {rank}: {world} ranks need an initialised process group")
            if dist.get_world_size(process_group) != world or dist.get_rank(process_group) != rank:
                raise CheckpointError(
                    f"rank {rank} of {world} was given a process group in which it is rank "
                    f"{dist.get_rank(process_group)} of {dist.get_world_size(process_group)}"
                )
        self.process_group, self.rank, self.world = process_group, rank, world

    @staticmethod
    def of_job() -> Ranks:
        """All ranks of the default group."""
        return Ranks(None, dist.get_rank(), dist.get_world_size())

    def phase(self, doing: str, work: Callable[[], T]) -> list[T]:
        """Runs `work` on every rank and returns all results in rank order.

        If it raises anywhere, every rank raises CheckpointError with the texts of all that failed: no rank is left
        waiting for one that has gone. `doing` names the phase, as in "saving /ckpt/global_step3".
        """
        result, raised = _attempt(work)
        outcomes = self._exchange(doing, (None if raised is None else describe(raised), result))
        if raised is not None and not isinstance(raised, Exception):
            raise raised
        failures = {r: text for r, (text, _) in enumerate(outcomes) if text is not None}
        if failures:
            raise failure(doing, failures, self.world) from raised
        return [value for _, value in outcomes]

    def on_rank0(self, doing: str, work: Callable[[], T]) -> T:
        """Like `phase`, with the work done by rank 0 only and its result given to all."""
        result: T = self.phase(doing, lambda: work() if self.rank == 0 else None)[0]  # type: ignore[assignment]
        return result

    def torch_phase(self, doing: str, work: Callable[[], T]) -> T:
        """Runs a collective call of torch.distributed.checkpoint, which itself raises on all ranks together."""
        try:
            with warnings.catch_warnings():
                # One process without a group is a supported way to run here; torch warns of it at each call.
                warnings.filterwarnings("ignore", message="torch.distributed is .*in a single process")
                return work()
        except CheckpointException as exc:
            own = exc.failures.get(self.rank, (None, None))[0]
            if own is not None and not isinstance(own, Exception):
                raise own from None
            told = {r: describe(e) for r, (e, _) in exc.failures.items()}
            raise failure(doing, told, self.world) from own
        except RuntimeError as exc:
            raise self._lost(doing, exc) from exc

    def torch_arguments(self) -> dict[str, Any]:
        """Keyword arguments that make torch.distributed.checkpoint use these ranks."""
        return {"no_dist": True} if self.world == 1 else {"process_group": self.process_group}

    def _exchange(self, doing: str, mine: Any) -> list[Any]:
        if self.world == 1:
            return [mine]
        everyone: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(everyone, mine, group=self.process_group)
        except RuntimeError as exc:
            raise self._lost(doing, exc) from exc
        return everyone

    def _lost(self, doing: str, exc: BaseException) -> RankError:
        return RankError(
            f"rank {self.rank} on {socket.gethostname()}: {doing}: another rank died, stopped or left the group "
            f"({first_line(exc)}); see the first error of the other ranks"
        )


def _attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """What `work` returned or raised; an interrupt too: the others must hear of it before this rank leaves."""
    try:
        return work(), None
    except BaseException as exc:
        return None, exc


def failure(doing: str, failures: dict[int, str], world: int) -> CheckpointError:
    """The error that every rank of `world` raises when those in `failures` could not do their part."""
    shown = [f"rank {r}: {text}" for r, text in sorted(failures.items())[:8]]
    if len(failures) > len(shown):
        shown.append(f"and {len(failures) - len(shown)} more ranks")
    if len(set(failures.values())) == 1 and len(failures) > 1:
        who = f"all {world} ranks" if len(failures) == world else f"ranks {sorted(failures)}"
        shown = [f"{who}: {next(iter(failures.values()))}"]
    return CheckpointError(f"{doing} failed on " + "; ".join(shown))


def describe(exc: BaseException) -> str:
    """One line of text for an error that travels to other ranks: what, where and, for the usual ones, the remedy."""
    if isinstance(exc, ZeroEngineError):
        return str(exc)
    text = f"{type(exc).__name__} on {socket.gethostname()}: {exc}"
    if isinstance(exc, OSError) and exc.errno in _REMEDIES:
        text += f" ({_REMEDIES[exc.errno]})"
    return text
