"""The engine's state as pieces of named tensors, saved and loaded whole.

Keys: `model.<name>` (parameters and persistent buffers as the model uses them), `master.<name>` (fp32 masters of 16-bit
parameters), `optim.<name>.<state>` (what the torch optimizer keeps for a parameter). A rank gives the parts it holds, so a
checkpoint does not know stages, ranks or buckets.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from zeroengine.checkpoint import find_checkpoint, load, save
from zeroengine.checkpoint.ranks import Ranks
from zeroengine.engine.mechanism import Mechanism
from zeroengine.engine.parallel import place_parts
from zeroengine.errors import CheckpointError
from zeroengine.logging import log_rank0
from zeroengine.optim.optimizer import ZeroOptimizer
from zeroengine.optim.schedules import apply_last_rates
from zeroengine.optim.state import restore_state, state_pieces
from zeroengine.zero.layout import Piece
from zeroengine.zero.residency import slot_of

if TYPE_CHECKING:
    from zeroengine.config import BatchSizes, Config
    from zeroengine.engine.data import EngineLoader
    from zeroengine.mesh import Mesh

Pieces = dict[str, list[Piece]]
F = TypeVar("F", bound=Callable[..., Any])


def model_pieces(module: nn.Module, mechanism: Mechanism, exclude_frozen: bool) -> Pieces:
    """This rank's parts of parameters and buffers. Whole frozen parameters and buffers are the same on all ranks."""
    found: Pieces = {}
    for bucket in mechanism.buckets:
        if exclude_frozen and not bucket.trainable:
            continue
        for s in bucket.layout.segments(bucket.own.start, bucket.own.stop):
            spec = bucket.layout.specs[s.index]
            data = bucket.shard[s.at : s.at + s.end - s.start]
            found.setdefault(f"model.{spec.name}", []).append(Piece(spec.name, spec.shape, s.start, data))
        for spec in bucket.layout.specs:
            found.setdefault(f"model.{spec.name}", [])
    for name, p in module.named_parameters():
        if slot_of(p) is None and p.numel() and not (exclude_frozen and not p.requires_grad):
            found[f"model.{name}"] = [Piece(name, p.shape, 0, p.data.view(-1))]
    for name, b in _persistent_buffers(module):
        if b.numel() and b.is_contiguous():
            found[f"model.{name}"] = [Piece(name, b.shape, 0, b.view(-1))]
    return found


def master_pieces(optimizer: ZeroOptimizer) -> Pieces:
    """This rank's parts of the masters that are separate from the values."""
    found: Pieces = {}
    for master in optimizer.masters:
        if master.separate:
            for spec in master.bucket.layout.specs:
                found[f"master.{spec.name}"] = []
            for _, piece in master.pieces():
                found[f"master.{piece.name}"].append(piece)
    return found


def optimizer_pieces(optimizer: ZeroOptimizer) -> Pieces:
    """This rank's parts of what the torch optimizer keeps; see `state_pieces`."""
    return state_pieces(optimizer.optimizer, optimizer.held())


def within_reach(*, write: bool) -> Callable[[F], F]:
    """For methods of an engine that read (with `write`: replace) everything it holds, also what lives on a disk."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def inside(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.mechanism.exposed(write=write):
                return method(self, *args, **kwargs)

        return cast(F, inside)

    return decorate


class CheckpointMethods:
    """Methods of `ZeroEngine` that save and load everything a run needs."""

    module: nn.Module
    settings: Config
    mechanism: Mechanism
    mesh: Mesh
    batch: BatchSizes
    lr_scheduler: Any
    training_dataloader: EngineLoader | None
    global_steps: int
    global_samples: int
    micro_steps: int
    _data: Iterator[Any] | None

    @within_reach(write=False)
    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves weights, masters, optimizer, scheduler, counters, loss scale and each rank's random states as
        `save_dir/tag` (default `global_step<N>`), completely or not at all. Collective. Raises `CheckpointError` on every
        rank if any cannot write; training may go on then."""
        if self.mechanism.reducer.unfinished:
            log_rank0("a checkpoint in the middle of an accumulation: the micro-batches since the last step are not in it", 30)
        optimizer = self.mechanism.optimizer
        pieces = model_pieces(self.module, self.mechanism, exclude_frozen_parameters)
        if optimizer is not None:
            optimizer.follow_edits()
            pieces.update(master_pieces(optimizer))
            pieces.update(optimizer_pieces(optimizer))
        save(
            Path(save_dir) / self._agreed_tag(tag or f"global_step{self.global_steps}"),
            self._pieces_to_save(place_parts(pieces, self.module)),
            {**self._counters(), "client_state": dict(client_state or {})},
            {"random": random_states()},
            process_group=None,
            rank=torch.distributed.get_rank(),
            world=torch.distributed.get_world_size(),
            latest=save_latest,
        )
        return True

    def _agreed_tag(self, tag: str) -> str:
        """The name under which all ranks save. Unlike ones are treated as `checkpoint.tag_validation` says; unless that is an
        error, rank 0's counts. Collective."""
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        tags = Ranks(None, rank, world).phase("agreeing on the checkpoint's tag", lambda: tag)
        if len(set(tags)) > 1:
            told = ", ".join(f"rank {r}: {t}" for r, t in enumerate(tags))
            wanted = self.settings.checkpoint.tag_validation
            if wanted == "Fail":
                raise CheckpointError(f"the ranks save under different tags ({told}); give the same tag on every rank")
            if wanted == "Warn":
                log_rank0(f"the ranks save under different tags ({told}); rank 0's is taken", 30)
        return tags[0]

    @within_reach(write=True)
    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        allow_pickle: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Loads `load_dir/tag` (default: the latest complete one), saved by any stage on any number of ranks. Returns (path,
        client_state); (None, {}) if there is none. Collective. Random states come back on the same number of ranks.
        `allow_pickle` reads client_state of arbitrary classes: only for checkpoints that you trust."""
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        found = find_checkpoint(Path(load_dir), tag, process_group=None, rank=rank, world=world)
        if found is None:
            log_rank0(f"no complete checkpoint in {load_dir}", 30)
            return None, {}
        optimizer = None if load_module_only else self.mechanism.optimizer
        with_state = optimizer is not None and load_optimizer_states
        pieces = place_parts(model_pieces(self.module, self.mechanism, exclude_frozen=False), self.module)
        self.mechanism.reducer.clear()
        self.mechanism.sharder.release_all()
        where: dict[str, Any] = {"process_group": None, "rank": rank, "world": world}
        loaded = load(found, pieces, strict=load_module_strict, only=["model."], allow_pickle=allow_pickle, **where)
        for bucket in self.mechanism.buckets:
            bucket.publish()
        for bucket in self.mechanism.buckets:
            bucket.wait()
        if self.mechanism.optimizer is not None:
            self.mechanism.optimizer.refresh_masters()
        if with_state and optimizer is not None:
            self._load_optimizer(found, optimizer, where)
        self._restore(loaded.replicated, with_state, load_lr_scheduler_states and not load_module_only, load_module_only)
        if loaded.per_rank is not None and not load_module_only:
            restore_random_states(loaded.per_rank["random"])
        elif loaded.per_rank_note is not None:
            log_rank0(loaded.per_rank_note)
        return str(found), dict(loaded.replicated.get("client_state", {}))

    def _load_optimizer(self, found: Path, optimizer: ZeroOptimizer, where: dict[str, Any]) -> None:
        wanted = place_parts(master_pieces(optimizer), self.module)
        masters = load(found, wanted, strict=False, only=["master."], verify=False, **where)
        if masters.missing and len(masters.missing) < len(wanted):
            raise CheckpointError(
                f"{found} lacks the masters of {', '.join(masters.missing[:5])}; load with load_module_only=True"
            )
        optimizer.make_state()
        wanted = place_parts(optimizer_pieces(optimizer), self.module)
        state = load(found, wanted, strict=False, only=["optim."], verify=False, **where)
        without = self._without_state(found, wanted, set(state.missing))
        restore_state(optimizer.optimizer, optimizer.held(), wanted, without)

    def _without_state(self, found: Path, wanted: Pieces, missing: set[str]) -> set[str]:
        """Parameters that had no gradient before the save: they have no state there, and must have none here. Raises
        `CheckpointError` on all ranks if the checkpoint is another optimizer's. Collective."""
        lacks: dict[str, list[bool]] = {}
        for key in wanted:
            lacks.setdefault(key.removeprefix("optim.").rpartition(".")[0], []).append(key in missing)
        without = {name for name, absent in lacks.items() if all(absent)}
        partly = sorted(name for name, absent in lacks.items() if any(absent) and not all(absent))
        facts = torch.tensor([len(lacks), len(without), len(partly)])
        every, empty, odd = self.mesh.control.exchange(facts, "optimizer state found").sum(0).tolist()
        if every and empty == every:
            raise CheckpointError(
                f"{found} has no optimizer state for these parameters; load it with load_optimizer_states=False to train on from "
                "its weights"
            )
        if odd:
            example = f", for example '{partly[0]}'" if partly else ""
            raise CheckpointError(
                f"{found} has only a part of what this optimizer keeps for {odd} parameters{example}: it was saved with other "
                "optimizer options; load it with load_optimizer_states=False, or train with the optimizer it was saved with"
            )
        return without

    def _pieces_to_save(self, pieces: Pieces) -> Pieces:
        """What this rank saves of what it holds."""
        return pieces

    def _counters(self) -> dict[str, Any]:
        optimizer = self.mechanism.optimizer
        scheduler = self.lr_scheduler.state_dict() if hasattr(self.lr_scheduler, "state_dict") else None
        groups = [] if optimizer is None else [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "micro_steps": self.global_steps * self.batch.accumulation,
            "skipped_steps": 0 if optimizer is None else optimizer.skipped_steps,
            "loss_scaler": {} if optimizer is None else optimizer.scaler.state_dict(),
            "scheduler": scheduler,
            "param_groups": groups,
            "data": None if self.training_dataloader is None else self.training_dataloader.state_dict(),
        }

    def _restore(self, values: dict[str, Any], with_state: bool, with_scheduler: bool, module_only: bool) -> None:
        if module_only:
            return
        self.global_steps, self.global_samples = values["global_steps"], values["global_samples"]
        self.micro_steps = self.global_steps * self.batch.accumulation
        optimizer = self.mechanism.optimizer
        if with_state and optimizer is not None:
            optimizer.skipped_steps = values["skipped_steps"]
            optimizer.scaler.load_state_dict(values["loss_scaler"])
            if len(values["param_groups"]) == len(optimizer.param_groups):
                for group, saved in zip(optimizer.param_groups, values["param_groups"], strict=True):
                    group.update(saved)
            else:
                log_rank0("the checkpoint has another number of parameter groups; learning rates stay as configured", 30)
        if with_scheduler and values["scheduler"] is not None and hasattr(self.lr_scheduler, "load_state_dict"):
            self.lr_scheduler.load_state_dict(values["scheduler"])
            if not with_state:
                apply_last_rates(self.lr_scheduler)
        if values["data"] is not None and self.training_dataloader is not None:
            self.training_dataloader.load_state_dict(values["data"])
            self._data = None  # `train_batch` goes on from there too


def random_states() -> dict[str, Any]:
    """States of Python's, NumPy's (where it is in use) and torch's generators on this rank."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.accelerator.is_available():
        states["device"] = torch.get_device_module().get_rng_state()
    try:
        import numpy
    except ImportError:
        return states
    states["numpy"] = numpy.random.get_state(legacy=True)
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["torch"])
    if "device" in states and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(states["device"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(tuple(states["numpy"]))


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, child in module.named_modules():
        for name, b in child._buffers.items():
            if b is not None and name not in child._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), b
