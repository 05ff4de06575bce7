"""A run of DeepSpeed's that goes on here: its checkpoint into the engine's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroengine.checkpoint import Comparison, Ranks
from zeroengine.checkpoint.deepspeed import MASTER, WEIGHT, DeepSpeedCheckpoint, Stored, loss_scale_state
from zeroengine.engine import pieces as state
from zeroengine.engine.loadplan import Index, LoadPlan, Verdict, class_name, plan_load
from zeroengine.engine.mechanism import Mechanism
from zeroengine.engine.parallel import place_parts
from zeroengine.engine.pieces import Pieces
from zeroengine.errors import CheckpointError
from zeroengine.logging import log_rank0, warn_rank0
from zeroengine.wording import listed
from zeroengine.zero.layout import Piece

_GROUP_KEYS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum")


def load_deepspeed(
    folder: Path, module: nn.Module, mechanism: Mechanism, strict: bool, with_state: bool, saved_name: Callable[[str], str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fills weights, masters and, `with_state`, the optimizer from a DeepSpeed checkpoint; returns (values as the engine
    itself saves them, client_state). Collective. Raises `CheckpointError` on every rank before anything is changed."""
    ranks, optimizer = Ranks.of_job(), mechanism.optimizer
    made: list[nn.Parameter] = []
    moments: Pieces = {}
    if with_state and optimizer is not None:
        made = state.make_state(optimizer)
        moments = place_parts(state.optimizer_pieces(optimizer), module)
    try:
        reader = _Reader(folder, module, mechanism, state.under_names(moments, saved_name), saved_name)
        surveys = ranks.phase(f"reading {folder}", reader.survey)
        verdict = Verdict(folder, reader.index, strict, class_name(optimizer) if with_state else None)
        missing = set().union(*(survey.missing for survey in surveys))
        excused = set().union(*(survey.excused for survey in surveys)) - missing
        unexpected = set(surveys[0].unexpected).intersection(*(survey.unexpected for survey in surveys))
        verdict(Comparison(tuple(sorted(missing)), tuple(sorted(excused)), tuple(sorted(unexpected)), {}))
    except CheckpointError:
        for p in made:
            optimizer.state.pop(p, None)  # type: ignore[union-attr]
        raise
    mechanism.reducer.forget()
    mechanism.sharder.release_all()
    reader.fill()
    reader.plan.finish(mechanism)
    if with_state and optimizer is not None:
        without = frozenset(p.name for _, p in optimizer.held() if saved_name(p.name) in verdict.without)
        state.fill_optimizer(optimizer, moments, without)
    client, strange = reader.source.client_state()
    if strange:
        warn_rank0(f"{folder}: these entries hold objects of DeepSpeed's or the user's classes and are left out: {strange}")
    log_rank0(f"{folder} was written by DeepSpeed; it keeps no random states, so those stay as they are")
    return reader.values(), client


@dataclass(frozen=True)
class _Survey:
    """What one rank wants in vain, and what is there that it does not want."""

    missing: list[str]
    excused: list[str]
    unexpected: list[str]


class _Reader:
    """What the engine wants, and where the checkpoint has it."""

    plan: LoadPlan
    source: DeepSpeedCheckpoint

    def __init__(self, folder: Path, module: nn.Module, mechanism: Mechanism, moments: Pieces, saved_name: Callable[[str], str]) -> None:
        self.folder, self.module, self.mechanism, self.moments = folder, module, mechanism, moments
        self.saved_name = saved_name
        self.index: Index = {}

    def survey(self) -> _Survey:
        """Opens the checkpoint and compares."""
        self.source = DeepSpeedCheckpoint(self.folder)
        for name, kinds in self.source.tensors.items():
            stored = kinds.get(MASTER) or kinds[WEIGHT]
            self.index[f"model.{name}"] = (stored.shape, torch.float32)
            for kind in kinds.keys() - {MASTER, WEIGHT}:
                self.index[f"optim.{name}.{kind}"] = (kinds[kind].shape, torch.float32)
        self.index.update({f"optim.{name}.step": (torch.Size(()), torch.float32) for name in self.source.steps})
        self.plan = plan_load(self.module, self.mechanism, self.index, self.saved_name)
        wrong = [
            f"{key} has shape {tuple(self.index[key][0])} in the checkpoint and {_whole(parts[0])} here"
            for key, parts in self.plan.wanted.items()
            if parts and key in self.index and tuple(self.index[key][0]) != _whole(parts[0])
        ]
        if wrong:
            raise CheckpointError(f"{self.folder} does not fit the model: {listed(wrong, separator='; ')}")
        others = {f"model.{self.saved_name(other)}" for other in state.other_names(self.module)}
        lacking = [key for key in (*self.plan.wanted, *self.moments) if key not in self.index]
        return _Survey(
            missing=[key for key in lacking if key not in self.plan.optional],
            excused=[key for key in lacking if key in self.plan.optional],
            unexpected=[k for k in self.index if k.startswith("model.") and k not in self.plan.wanted and k not in others],
        )

    def fill(self) -> None:
        for key, parts in self.plan.wanted.items():
            if key in self.index:
                kinds = self.source.tensors[key.removeprefix("model.")]
                _copy(kinds.get(MASTER) or kinds[WEIGHT], parts)
        for key, parts in self.moments.items():
            name, _, kind = key.removeprefix("optim.").rpartition(".")
            if kind == "step" and name in self.source.steps:
                for piece in parts:
                    piece.data.fill_(self.source.steps[name])
            elif key in self.index:
                _copy(self.source.tensors[name][kind], parts)

    def values(self) -> dict[str, Any]:
        """Counters, loss scale, groups and scheduler under the names of our own checkpoints."""
        states, optimizer = self.source.states, self.mechanism.optimizer
        groups = [{k: g[k] for k in _GROUP_KEYS if k in g} for g in self.source.groups]
        scale = loss_scale_state(self.source.loss_scaler)
        scaler: dict[str, Any] = {}
        if scale is not None and optimizer is not None:
            scaler = {**optimizer.scaler.state_dict(), "kind": "dynamic", **scale}
        return {
            "global_steps": int(states.get("global_steps", 0)),
            "global_samples": int(states.get("global_samples", 0)),
            "skipped_steps": int(states.get("skipped_steps", 0)),
            "loss_scaler": scaler,
            "scheduler": states.get("lr_scheduler"),
            "param_groups": groups,
            "data": None,
        }


def _whole(piece: Piece) -> tuple[int, ...]:
    """Shape of the tensor that the checkpoint has."""
    return tuple(piece.shape if piece.part is None else piece.part.whole_shape(piece.shape))


def _copy(stored: Stored, parts: list[Piece]) -> None:
    for piece in parts:
        if piece.part is None:
            stored.copy(piece.start, piece.data)
            continue
        whole = torch.empty(_whole(piece), dtype=piece.data.dtype)  # one parameter at a time
        stored.copy(0, whole.view(-1))
        piece.data.copy_(piece.part.cut(whole).view(-1)[piece.start : piece.start + piece.data.numel()])
