"""`save_checkpoint` and `load_checkpoint`: everything a run needs, from any stage and number of ranks to any other."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.checkpoint import BackgroundSaver, Comparison, Loaded, Ranks, find_checkpoint, find_foreign, load, read_index, save
from zeroengine.config import BatchSizes, Config
from zeroengine.engine import pieces as state
from zeroengine.engine.data import EngineLoader
from zeroengine.engine.foreign import load_deepspeed
from zeroengine.engine.loadplan import Verdict, class_name, plan_load
from zeroengine.engine.mechanism import Mechanism
from zeroengine.engine.parallel import place_parts
from zeroengine.engine.pieces import Pieces
from zeroengine.engine.randomness import random_states, restore_random_states
from zeroengine.engine.state import model_files
from zeroengine.errors import CheckpointError
from zeroengine.logging import log_once, log_rank0, warn_rank0
from zeroengine.mesh import Mesh
from zeroengine.optim.schedules import apply_last_rates
from zeroengine.zero.experts import names_of

_SCHEDULED = ("lr", "initial_lr", "betas", "momentum")  # options that a schedule moves


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
    _background: BackgroundSaver | None
    _registered: tuple[Any, ...]
    _data: Iterator[Any] | None

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        blocking: bool = True,
        keep_last: int | None = None,
    ) -> bool:
        """Saves weights, masters, optimizer, scheduler, counters, loss scale and each rank's random states as
        `save_dir/tag` (default `global_step<N>`), completely or not at all. Collective. Raises `CheckpointError` on every
        rank if any cannot write; training may go on then.

        With `blocking=False` the state is copied to host memory and written while training goes on, that of the optimizer beside
        the next forward and backward (see `_copied_later`); the next save,
        `wait_for_checkpoint`, `destroy` or the end of the process waits for it, and the first three raise its error.
        `keep_last` removes older complete checkpoints of `save_dir` once this one is durable.
        """
        self.wait_for_checkpoint()
        self._warn_of_strange_schedule()
        if self.mechanism.reducer.unfinished:
            warn_rank0("a checkpoint in the middle of an accumulation: the micro-batches since the last step are not in it")
        folder = Path(save_dir) / self._agreed_tag(tag or f"global_step{self.global_steps}")
        values = {**self._counters(), "client_state": dict(client_state or {}), **self._about(exclude_frozen_parameters)}
        own = {"random": random_states(), "buffers": self._own_buffers()}
        self._follow_edits()
        with self.mechanism.exposed(write=False):
            tensors = self._pieces_to_save(self._held_pieces(exclude_frozen_parameters))
            if blocking:
                save(folder, tensors, values, own, latest=save_latest, keep_last=keep_last, **_world())
            else:
                if self._background is None:
                    self._background = BackgroundSaver()
                later = self._copied_later(self._background)
                self._background.start(folder, tensors, values, own, latest=save_latest, keep_last=keep_last, later=later)
        return True

    def register_for_checkpoint(self, *objects: Any) -> None:
        """Objects of the user's own with `state_dict` and `load_state_dict` (a learning-rate schedule that the script steps itself, a
        counter) whose state is saved and loaded with every checkpoint from now on: in the same order in the run that loads. The state
        is that of rank 0."""
        for each in objects:
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise TypeError(f"register_for_checkpoint takes objects with state_dict and load_state_dict, not {type(each).__name__}")
        self._registered += objects

    def _warn_of_strange_schedule(self) -> None:
        """torch's schedules leave `initial_lr` in the groups that they move."""
        optimizer = self.mechanism.optimizer
        if optimizer is None or self.lr_scheduler is not None or not any("initial_lr" in g for g in optimizer.param_groups):
            return
        if not any(hasattr(each, "get_last_lr") for each in self._registered):
            log_once(
                "a schedule moves the learning rates that the engine does not know, and its position is not in the checkpoint; give it to "
                "zeroengine.initialize(lr_scheduler=...), or to engine.register_for_checkpoint if the script steps it (or save it yourself)"
            )

    def _follow_edits(self) -> None:
        """Masters follow what was written into parameters. Collective. What lives on a disk is stored again by this, so it comes
        before all is exposed for reading, where ranks also hear of each other's disks."""
        placement, optimizer = self.mechanism.placement, self.mechanism.optimizer
        placement.check_here()
        if optimizer is not None:
            optimizer.check_untorn()
            with placement.faults.kept():
                optimizer.follow_edits()

    def _held_pieces(self, exclude_frozen: bool) -> Pieces:
        """What this rank writes of weights, masters and optimizer state."""
        optimizer, share = self.mechanism.optimizer, state.Share(self.mechanism.groups)
        tensors = state.model_pieces(self.module, self.mechanism, exclude_frozen=exclude_frozen, share=share)
        if optimizer is not None:
            tensors.update(state.master_pieces(optimizer, share))
            tensors.update(state.optimizer_pieces(optimizer, share))
        return place_parts(tensors, self.module)

    def _copied_later(self, background: BackgroundSaver) -> Callable[[str], bool]:
        """Which values a save in the background may copy after `save_checkpoint` has returned: the optimizer's state in memory. Only
        the engine changes it, and waits for the copy first (`ZeroOptimizer.settle`); weights are anybody's to change at any time."""
        optimizer = self.mechanism.optimizer
        if optimizer is None or self.mechanism.placement.state_rule.tier == "nvme":
            return lambda key: False
        optimizer.readers = background.staged
        return lambda key: key.startswith("optim.")

    def wait_for_checkpoint(self) -> None:
        """Returns when the save in the background, if there is one, is complete; raises its error."""
        if self._background is not None:
            self._background.wait()

    def _end_background_saves(self) -> None:
        """Waits for the save under way and raises its error. Collective."""
        background, self._background = self._background, None
        if self.mechanism.optimizer is not None:
            self.mechanism.optimizer.readers = None
        if background is not None:
            background.close()

    def _agreed_tag(self, tag: str) -> str:
        """The name under which all ranks save. Unlike ones are treated as `checkpoint.tag_validation` says; unless that is an
        error, rank 0's counts. Collective."""
        tags = Ranks.of_job().phase("agreeing on the checkpoint's tag", lambda: tag)
        if len(set(tags)) > 1:
            told = ", ".join(f"rank {r}: {t}" for r, t in enumerate(tags))
            wanted = self.settings.checkpoint.tag_validation
            if wanted == "Fail":
                raise CheckpointError(f"the ranks save under different tags ({told}); give the same tag on every rank")
            if wanted == "Warn":
                warn_rank0(f"the ranks save under different tags ({told}); rank 0's is taken")
        return tags[0]

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
        """Loads `load_dir/tag` (default: the latest complete one), saved by any stage and precision on any number of ranks.
        Returns (path, client_state); (None, {}) if there is none. Collective.

        Masters come with the weights, in full precision where the checkpoint has it. `load_module_only` loads nothing else;
        `load_optimizer_states=False` leaves the optimizer and the loss scale as they are. Unless `load_module_strict`,
        missing and unexpected weights are reported and left alone. Random states come back on the same number of ranks.
        `allow_pickle` reads client_state of arbitrary classes: only for checkpoints that you trust.

        A checkpoint that DeepSpeed wrote (stages 1 to 3, universal) is recognised and read, optimizer state included.

        Raises `CheckpointError` on every rank, before anything is changed, if the checkpoint does not fit or is damaged.
        """
        self.wait_for_checkpoint()
        folder = find_foreign(Path(load_dir), tag, **_world())
        foreign = folder is not None
        if folder is None:
            folder = find_checkpoint(Path(load_dir), tag, **_world())
        if folder is None:
            warn_rank0(f"no complete checkpoint in {load_dir}")
            return None, {}
        with_state = self.mechanism.optimizer is not None and load_optimizer_states and not load_module_only
        own: dict[str, Any] = {}
        with self.mechanism.exposed(write=True):
            if foreign:
                values, client = load_deepspeed(folder, self.module, self.mechanism, load_module_strict, with_state, self._saved_name)
            else:
                loaded = self._load_own(folder, load_module_strict, with_state, allow_pickle)
                values, client = loaded.replicated, dict(loaded.replicated.get("client_state", {}))
                own = loaded.per_rank or {}
        if not load_module_only:
            self._restore(values, with_state, load_lr_scheduler_states)
            self._restore_own(own)
        return str(folder), client

    def _load_own(self, found: Path, strict: bool, with_state: bool, allow_pickle: bool) -> Loaded:
        """Fills weights, masters and, `with_state`, the optimizer from one of our checkpoints. Collective."""
        index = read_index(found, **_world())
        optimizer = self.mechanism.optimizer if with_state else None
        self.mechanism.sharder.release_all()
        made = state.make_state(optimizer) if optimizer is not None else []
        try:
            moments = place_parts(state.optimizer_pieces(optimizer), self.module) if optimizer is not None else {}
            plan = plan_load(self.module, self.mechanism, index, self._saved_name)
            verdict = Verdict(found, index, strict, class_name(optimizer))

            def fits(comparison: Comparison) -> None:
                verdict(comparison)
                self.mechanism.reducer.forget()  # of a step that was begun: nothing has changed before the verdict

            loaded = load(
                found, {**plan.wanted, **state.under_names(moments, self._saved_name)}, strict=False, only=Verdict.KINDS,
                allow_pickle=allow_pickle, optional=plan.optional, check=fits, **_world(),
            )  # fmt: skip
        except CheckpointError:
            for p in made:  # as if nobody had asked
                optimizer.state.pop(p, None)  # type: ignore[union-attr]
            raise
        plan.finish(self.mechanism)
        if optimizer is not None:
            without = frozenset(p.name for _, p in optimizer.held() if self._saved_name(p.name) in verdict.without)
            state.fill_optimizer(optimizer, moments, without)
        return loaded

    def _restore_own(self, values: dict[str, Any]) -> None:
        """What only this rank had, where the checkpoint is of as many ranks."""
        if "random" in values:
            restore_random_states(values["random"])
        buffers = values.get("buffers", {})
        for name, b in state.persistent_buffers(self.module):
            if name in buffers:
                b.copy_(buffers[name])

    def _own_buffers(self) -> dict[str, Tensor]:
        """Buffers whose values are not those of rank 0 (running statistics that nobody averages). Collective."""
        named = list(state.persistent_buffers(self.module))
        if not named:
            return {}
        values = [b.detach().to("cpu").contiguous() for _, b in named]
        sums = [zlib.crc32(v.view(-1).view(torch.uint8).numpy().tobytes()) if v.numel() else 0 for v in values]
        table = self.mechanism.groups.control.exchange(torch.tensor(sums, dtype=torch.int64), "buffers of a checkpoint")
        rank0 = table[0].tolist()
        return {n: v for (n, _), v, mine, first in zip(named, values, sums, rank0, strict=True) if mine != first}

    def _pieces_to_save(self, pieces: Pieces) -> Pieces:
        """What this rank saves of what it holds, under the names of the checkpoint."""
        return pieces

    def _saved_name(self, name: str) -> str:
        """The checkpoint's name of a parameter or buffer of this rank's module."""
        return name

    def _about(self, exclude_frozen: bool) -> dict[str, Any]:
        """What turns a checkpoint into a model folder without the model: names of tied weights, names of what is left out, and
        the configuration. Collective."""
        frozen = [(n, p) for n, p in self.module.named_parameters() if not p.requires_grad] if exclude_frozen else []
        excluded = [each for n, p in frozen for each in names_of(p, n)]
        return {"excluded": excluded, "other_names": state.other_names(self.module), "model_files": model_files(self.module)}

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
            "optimizer": class_name(optimizer),
            "data": None if self.training_dataloader is None else self.training_dataloader.state_dict(),
            "registered": [each.state_dict() for each in self._registered],
        }

    def _restore(self, values: dict[str, Any], with_state: bool, with_scheduler: bool) -> None:
        self.global_steps, self.global_samples = values["global_steps"], values["global_samples"]
        self.micro_steps = self.global_steps * self.batch.accumulation
        optimizer = self.mechanism.optimizer
        if with_state and optimizer is not None:
            optimizer.skipped_steps = values["skipped_steps"]
            if values["loss_scaler"]:
                optimizer.scaler.load_state_dict(values["loss_scaler"])
            _restore_groups(optimizer.param_groups, values["param_groups"])
        if with_scheduler and hasattr(self.lr_scheduler, "load_state_dict"):
            if values["scheduler"] is None:
                warn_rank0("the checkpoint has no scheduler: the schedule of the learning rate starts from its beginning")
            else:
                self.lr_scheduler.load_state_dict(values["scheduler"])
                if not with_state:
                    apply_last_rates(self.lr_scheduler)
        if self.training_dataloader is not None:
            self._restore_data(self.training_dataloader, values)
        self._restore_registered(values.get("registered", []))

    def _restore_registered(self, states: list[Any]) -> None:
        if len(states) != len(self._registered):
            warn_rank0(
                f"the checkpoint has the state of {len(states)} registered objects, and {len(self._registered)} are registered: theirs "
                "stays as it is"
            )
            return
        for each, values in zip(self._registered, states, strict=True):
            each.load_state_dict(values)

    def _restore_data(self, loader: EngineLoader, values: dict[str, Any]) -> None:
        position = values.get("data")
        if position is None:
            position = {"epoch": max((values.get("epoch") or 0) - 1, 0), "samples": 0}
            warn_rank0(
                "the checkpoint does not say where its data stood (it was saved without a loader of the engine's, or before "
                f"positions were kept): the data go on with the first sample of epoch {position['epoch']}"
            )
        loader.load_state_dict(position)
        self._data = None  # `train_batch` goes on from there too


def _restore_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Options of the optimizer are those of the checkpoint, as in torch; says where that is not what was configured."""
    if len(saved) != len(groups):
        warn_rank0(
            f"the checkpoint has {len(saved)} parameter groups and the optimizer {len(groups)}: learning rates and other options "
            "stay as configured"
        )
        return
    for i, (group, options) in enumerate(zip(groups, saved, strict=True)):
        known = {k: v for k, v in options.items() if k in group or k == "initial_lr"}
        plain = {k: v for k, v in known.items() if isinstance(v, (bool, int, float, str)) and k not in _SCHEDULED}
        changed = [f"{k} {group[k]} -> {v}" for k, v in plain.items() if group[k] != v]
        if changed:
            log_rank0(f"options of the optimizer (group {i}) become those of the checkpoint: {', '.join(changed)}")
        unknown = [f"{k}={v}" for k, v in options.items() if k not in known and v not in (None, False)]
        if unknown:
            log_rank0(f"the optimizer has no options {', '.join(unknown)}, which the checkpoint has (group {i})")
        group.update(known)


def _world() -> dict[str, Any]:
    return {"process_group": None, "rank": torch.distributed.get_rank(), "world": torch.distributed.get_world_size()}
