"""DeepSpeed's ZeRO checkpoints, read by parameter: stages 1, 2 and 3 as they were saved, and universal ones.

What is where (DeepSpeed 0.19): in each rank's `*_optim_states.pt`, stages 1 and 2 keep for every parameter group one flat
slice of masters and of each moment; the ranks' slices one after another hold the parameters in the order of `param_shapes`, each
followed by its alignment padding. (`param_slice_mappings` is not used: with round-robin gradients it is of another order.)
Stage 3 keeps each parameter's own slice (ceil(numel / ranks) elements) one after another, in the same order. A universal
checkpoint has a folder for each parameter. Weights that are not optimized lie in the model states.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroengine.checkpoint.folder import MARKER, check_tag
from zeroengine.checkpoint.foreign_pickle import has_unknown, load_foreign
from zeroengine.checkpoint.ranks import Ranks
from zeroengine.errors import CheckpointError
from zeroengine.wording import listed

_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
    "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples",
    "dp_world_size", "mp_world_size", "ds_config", "ds_version", "universal_checkpoint_info", "micro_steps", "zero_param_info",
    "autotp_config", "checkpoint_parallel_dimensions",
}  # fmt: skip
_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_EXPORT = "let DeepSpeed export its weights and load those"
MASTER, WEIGHT = "fp32", "weight"


@dataclass
class Stored:
    """One tensor in flat pieces: (first element, 1-D values), in order; `shape` is the whole tensor's."""

    shape: torch.Size
    pieces: list[tuple[int, Tensor]] = field(default_factory=list)

    def copy(self, start: int, out: Tensor) -> None:
        """Fills 1-D `out` with elements [start, start + out.numel()), cast to its type."""
        for at, values in self.pieces:
            lo, hi = max(at, start), min(at + values.numel(), start + out.numel())
            if lo < hi:
                out[lo - start : hi - start].copy_(values[lo - at : hi - at])

    @property
    def complete(self) -> bool:
        return sum(values.numel() for _, values in self.pieces) == self.shape.numel()


def find_deepspeed(directory: Path, tag: str | None) -> Path | None:
    """The DeepSpeed checkpoint that `tag` or the file `latest` names in `directory`, or None if that is none of DeepSpeed's."""
    if tag is None:
        try:
            tag = (directory / "latest").read_text("utf-8").strip()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError):
            return None
    try:
        check_tag(tag)
    except CheckpointError:
        return None
    folder = directory / tag
    if not folder.is_dir() or (folder / MARKER).exists():
        return None
    return folder if (folder / "zero").is_dir() or next(folder.glob("*mp_rank_*_model_states.pt"), None) else None


def find_foreign(directory: Path, tag: str | None = None, *, process_group: ProcessGroup | None, rank: int, world: int) -> Path | None:
    """`find_deepspeed` by rank 0 for all ranks. Collective."""

    def work() -> str | None:
        found = find_deepspeed(Path(directory).absolute(), tag)
        return None if found is None else str(found)

    found = Ranks(process_group, rank, world).on_rank0(f"looking for a checkpoint in {directory}", work)
    return None if found is None else Path(found)


class DeepSpeedCheckpoint:
    """`tensors[name][kind]`: kind is "fp32" (masters), a name that the optimizer uses ("exp_avg"), or "weight" (frozen
    parameters and buffers). `steps` are step counts by parameter; `states` the model states of rank 0."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError if the checkpoint is incomplete or of a kind that has no counterpart here."""
        self.folder = folder
        self.tensors: dict[str, dict[str, Stored]] = {}
        self.steps: dict[str, float] = {}
        self.groups: list[dict[str, Any]] = []
        self.loss_scaler: Any = None
        self._refuse()
        files = sorted(folder.glob("*mp_rank_00_model_states.pt"), key=lambda p: (p.name.count("pp_rank"), p.name))
        if not files:
            raise CheckpointError(f"{folder} has no model states (mp_rank_00_model_states.pt); copy all files of the tag there")
        self.states: dict[str, Any] = load_foreign(files[0])
        if (folder / "zero").is_dir():
            self._read_universal(folder / "zero")
        else:
            self._read_ranks()
        for other, name in (self.states.get("shared_params") or {}).items():
            if name in self.tensors or other in self.tensors:
                stored = self.tensors.get(name) or self.tensors[other]
                self.tensors[name] = self.tensors[other] = stored
        self._read_weights(files)
        lost = [f"{name} ({kind})" for name, kinds in self.tensors.items() for kind, t in kinds.items() if not t.complete]
        if lost:
            raise CheckpointError(f"{folder} does not hold all elements of {listed(lost)}: is a rank's file missing?")

    def _refuse(self) -> None:
        kinds = {"layer_*model_states.pt": "pipeline stages", "*expert_*": "experts", "*mp_rank_01*": "tensor slices"}
        for pattern, what in kinds.items():
            if next(self.folder.glob(pattern), None) is not None:
                raise CheckpointError(f"{self.folder} holds {what}: only data-parallel DeepSpeed checkpoints are read; {_EXPORT}")

    # --- stages 1, 2, 3 -------------------------------------------------------------------------------------------

    def _read_ranks(self) -> None:
        files = {int(m[1]): p for p in self.folder.iterdir() if (m := _RANK.fullmatch(p.name))}
        if not files:
            return  # ZeRO was off: only the weights are read
        world = int(self.states.get("dp_world_size") or len(files))
        missing = sorted(set(range(world)) - files.keys())
        if missing:
            raise CheckpointError(
                f"{self.folder} was saved by {world} ranks and lacks the optimizer states of {missing}; copy the files of all ranks there"
            )
        shapes: Sequence[dict[str, torch.Size]] = self.states.get("param_shapes") or []
        starts = [0] * len(shapes)
        for rank in range(world):
            state = load_foreign(files[rank])["optimizer_state_dict"]
            if "fp32_flat_groups" in state:
                if state.get("ds_zero_partition_groups") is not None:
                    raise CheckpointError(f"{self.folder}: parameters are cut over several groups of ranks, which is not read; {_EXPORT}")
                self._read_stage3(state, shapes, rank, world)
            elif "single_partition_of_fp32_groups" in state:
                self._read_stage12(state, shapes, starts)
            else:
                keys = ", ".join(sorted(map(str, state)))[:200]
                raise CheckpointError(f"{files[rank]}: its layout is not known (keys {keys}); {_EXPORT}")
            if rank == 0:
                self.loss_scaler = state.get("loss_scaler")

    def _read_stage12(self, state: dict[str, Any], shapes: Sequence[dict[str, torch.Size]], starts: list[int]) -> None:
        """`starts`: where this rank's slice of each group begins; moved on to the next rank's."""
        base = state["base_optimizer_state"]
        if not isinstance(base, dict):
            raise CheckpointError(f"{self.folder} was saved with elastic_checkpoint, an old layout: save it without")
        self.groups = base["param_groups"]
        paddings = state.get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
        for g, (group, padding) in enumerate(zip(shapes, paddings, strict=True)):
            flats = {MASTER: state["single_partition_of_fp32_groups"][g], **_moments(base["state"].get(g, {}))}
            step = _step(base, g, g)
            first, end, at = starts[g], starts[g] + flats[MASTER].numel(), 0
            for (name, shape), gap in zip(group.items(), padding, strict=True):
                lo, hi = max(at, first), min(at + shape.numel(), end)
                for kind, flat in flats.items():
                    stored = self._stored(name, kind, shape)
                    if lo < hi:
                        stored.pieces.append((lo - at, flat.detach().view(-1)[lo - first : hi - first]))
                if step is not None:
                    self.steps[name] = step
                at += shape.numel() + gap
            starts[g] = end

    def _read_stage3(self, state: dict[str, Any], shapes: Sequence[dict[str, torch.Size]], rank: int, world: int) -> None:
        base = state["optimizer_state_dict"]
        self.groups = base["param_groups"]
        flats = [{MASTER: flat, **_moments(base["state"].get(i, {}))} for i, flat in enumerate(state["fp32_flat_groups"])]
        line = _in_order(flats)
        current, at = next(line)
        for name, shape in ((n, s) for group in shapes for n, s in group.items()):
            part = -(-shape.numel() // world)
            while at + part > flats[current][MASTER].numel():
                current, at = next(line)
            first = rank * part
            held = max(min(part, shape.numel() - first), 0)
            for kind, flat in flats[current].items():
                self._stored(name, kind, shape).pieces.append((first, flat.detach().view(-1)[at : at + held]))
            step = _step(base, current, 0)
            if step is not None:
                self.steps[name] = step
            at += part

    def _stored(self, name: str, kind: str, shape: torch.Size) -> Stored:
        return self.tensors.setdefault(name, {}).setdefault(kind, Stored(torch.Size(shape)))

    # --- universal, weights ---------------------------------------------------------------------------------------

    def _read_universal(self, zero: Path) -> None:
        zero_config = (self.states.get("ds_config") or {}).get("zero_optimization") or {}
        if isinstance(zero_config, dict) and zero_config.get("round_robin_gradients") and zero_config.get("stage") == 2:
            raise CheckpointError(
                f"{self.folder} was converted from a run with round_robin_gradients, whose parameters DeepSpeed's converter "
                "(0.19.8) mixes up; load the checkpoint it was made from, which is read right"
            )
        # Stage 3 is converted without shapes; the model states have them.
        shapes = {n: s for group in self.states.get("param_shapes") or [] for n, s in group.items()}
        for folder in sorted(p for p in zero.iterdir() if p.is_dir()):
            for path in sorted(folder.glob("*.pt")):
                found = load_foreign(path)
                value = (found["param"] if isinstance(found, dict) else found).detach()
                if path.stem == "step":
                    self.steps[folder.name] = float(value)
                else:
                    shape = torch.Size(shapes.get(folder.name, value.shape))
                    self.tensors.setdefault(folder.name, {})[path.stem] = Stored(shape, [(0, value.reshape(-1))])
        if (zero / "optimizer_state.pt").exists():
            state = load_foreign(zero / "optimizer_state.pt")
            base = state.get("optimizer_state_dict") or state.get("base_optimizer_state") or {}
            self.loss_scaler = state.get("loss_scaler")
            self.groups = state.get("param_groups") or base.get("param_groups", [])
            step = _step(base, 0, 0)
            if step is not None:
                for name in shapes:
                    self.steps.setdefault(name, step)

    def _read_weights(self, files: Sequence[Path]) -> None:
        for name, value in (self.states.get("module") or {}).items():
            if isinstance(value, Tensor) and name not in self.tensors:
                self.tensors[name] = {WEIGHT: Stored(value.shape, [(0, value.reshape(-1))])}
        frozen = self.states.get("frozen_param_shapes") or {}
        ranks = [self.states, *(load_foreign(p) for p in files[1:])] if frozen and len(files) > 1 else [self.states]
        for name, shape in frozen.items():
            stored = Stored(torch.Size(shape))
            at = 0
            for states in ranks:
                values = (states.get("frozen_param_fragments") or {})[name].reshape(-1)[: stored.shape.numel() - at]
                stored.pieces.append((at, values))
                at += values.numel()
            self.tensors[name] = {WEIGHT: stored}

    def client_state(self) -> tuple[dict[str, Any], list[str]]:
        """What the user saved beside; and the names of entries that hold objects of unknown classes and are left out."""
        given = {k: v for k, v in self.states.items() if k not in _OWN}
        strange = [k for k, v in given.items() if has_unknown(v)]
        return {k: v for k, v in given.items() if k not in strange}, strange


def _moments(state: dict[str, Any]) -> dict[str, Tensor]:
    return {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim() > 0}


def _step(base: dict[str, Any], index: int, group: int) -> float | None:
    """DeepSpeed's own Adam counts in the state or in the group, torch's in the state."""
    value = base.get("state", {}).get(index, {}).get("step")
    if value is None and group < len(base.get("param_groups", [])):
        value = base["param_groups"][group].get("step")
    return None if value is None else float(value)


def _in_order(flats: Sequence[dict[str, Tensor]]) -> Iterator[tuple[int, int]]:
    """(index, 0) of every flat group that has elements."""
    for i, kinds in enumerate(flats):
        if kinds[MASTER].numel():
            yield i, 0
    raise CheckpointError("the flat groups have fewer elements than the parameters that should lie in them")


def loss_scale_state(scaler: Any) -> dict[str, float] | None:
    """(scale, good steps, credit) of a dynamic scaler, None for a fixed one."""
    found = vars(scaler) if hasattr(scaler, "__dict__") else {}
    if "cur_scale" not in found or "cur_iter" not in found:
        return None
    good = int(found["cur_iter"]) - int(found.get("last_overflow_iter", -1)) - 1
    return {"scale": float(found["cur_scale"]), "good_steps": max(good, 0), "credit": int(found.get("cur_hysteresis", 1))}
