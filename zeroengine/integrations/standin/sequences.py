"""`deepspeed.runtime.sequence_parallel.ulysses_sp` and the groups that go with it: sequences that ranks share, over `mesh.cp`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from zeroengine.errors import ConfigError
from zeroengine.integrations.batches import in_turn, tokens_of
from zeroengine.logging import log_once


class SequenceRanks:
    """Which ranks share this one's sequences, once a script has said how many do. DeepSpeed's functions ask it of the process."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._world: Any = None

    def share(self, size: int) -> None:
        """Makes groups of `size` neighbours. Collective the first time. Raises `ConfigError` for sizes that do not fit."""
        world, everyone = dist.get_world_size(), dist.group.WORLD
        if size < 2 or world % size:
            raise ConfigError(f"sequences over {size} ranks: it must be 2 or more and divide the {world} ranks of the job")
        if self._group is None or self._world is not everyone or self._group.size() != size:
            self._world, self._group = everyone, dist.new_subgroups(size)[0]

    def group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise ConfigError(
                "no ranks share sequences: call UlyssesSPAttentionHF.register_with_transformers, or initialize_sequence_parallel, before"
            )
        return self._group


_shared = SequenceRanks()


class SequenceParallelism:
    """The `mpu` of `register_with_transformers`: `deepspeed.initialize` reads from it what the engine is to do."""

    def __init__(self, size: int, disable_in_eval: bool = False) -> None:
        self.size, self.disable_in_eval = size, disable_in_eval

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        return _shared.group()

    def get_sequence_parallel_world_size(self) -> int:
        return self.size

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank(_shared.group())

    def configured(self, settings: dict[str, Any]) -> dict[str, Any]:
        """A configuration with what this asks for, beside what it says itself. Raises `ConfigError` if it says another degree."""
        mesh = dict(settings.get("mesh", {}))
        said = mesh.get("cp", settings.get("sequence_parallel_size", 1))
        if said not in (1, self.size):
            raise ConfigError(
                f"register_with_transformers was given sequence_parallel_size {self.size}, and the configuration says {said} "
                "(`mesh.cp` or `sequence_parallel_size`); make them agree"
            )
        section = {"disable_in_eval": self.disable_in_eval, **settings.get("sequence_parallel", {}), "batches": "cut"}
        kept = {name: value for name, value in settings.items() if name != "sequence_parallel_size"}
        return {**kept, "mesh": {**mesh, "cp": self.size}, "sequence_parallel": section}


class UlyssesSPAttentionHF:
    """`register_with_transformers`, which accelerate calls for a `ParallelismConfig(sp_size=..., sp_backend="deepspeed")`."""

    @classmethod
    def register_with_transformers(
        cls, model_name_or_path: Any, core_attn_implementation: str | None = "sdpa", sequence_parallel_size: int = 1,
        micro_batch_size: int | None = None, seq_length: int | None = None, seq_length_is_variable: bool = True,
        disable_in_eval: bool = False, max_length: int | None = None,
    ) -> SequenceParallelism | None:  # fmt: skip
        """What to give `deepspeed.initialize(mpu=...)`, which exchanges the model's attention; None for a size of 1.

        Lengths and the micro-batch may vary and are not read; the attention computed is exact, whichever
        `core_attn_implementation` names. Which one runs over the ranks is the configuration's `sequence_parallel.attention`.
        """
        if sequence_parallel_size == 1:
            return None
        if core_attn_implementation not in (None, "sdpa"):
            log_once(f"core_attn_implementation {core_attn_implementation!r} is not used: zeroengine has attention of its own for this")
        _shared.share(sequence_parallel_size)
        return SequenceParallelism(sequence_parallel_size, disable_in_eval)


def data_loader(dl: Any, sp_rank: int, sp_group: dist.ProcessGroup, sp_world_size: int, device: torch.device | str) -> Any:
    """`UlyssesSPDataLoaderAdapter`: the batches of the ranks of `sp_group` in turn, of each this rank's tokens. Labels become
    `shift_labels`; position ids are made where they are missing, and a length that does not divide is padded."""
    return in_turn(dl, sp_group, torch.device(device), tokens_of(sp_rank, sp_world_size))


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    _shared.share(sequence_parallel_size)


def get_group() -> dist.ProcessGroup:
    return _shared.group()


def get_world_size() -> int:
    return _shared.group().size()


def get_rank() -> int:
    return dist.get_rank(_shared.group())


def batch_of_accelerate(settings: Mapping[str, Any], world: int) -> Mapping[str, Any]:
    """`settings` with the true `train_batch_size`, where accelerate's program counted each of the ranks that share layers
    (`tensor_parallel.autotp_size`), as DeepSpeed does. They are given the same samples.

    Raises `ConfigError` for a degree of `mesh.cp` of which accelerate was not told: its loaders give ranks other samples."""
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    counts = [count for count in map(settings.get, names) if isinstance(count, int)]
    state: Mapping[str, Any] = getattr(getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None), "_shared_state", {})
    if not state or len(counts) < len(names) or counts[0] * counts[1] * world != counts[2]:
        return settings
    tp = _degree(settings, "tensor_parallel", "autotp_size")
    cp = max(_degree(settings, "mesh", "cp"), _number(settings, "sequence_parallel_size"))
    if cp > 1:
        raise ConfigError(
            f"the configuration says that {cp} ranks share sequences, and accelerate reads other samples for each of the {world} ranks; "
            f'tell it with ParallelismConfig(sp_backend="deepspeed", sp_size={cp}), which TrainingArguments and Accelerator take as '
            "parallelism_config"
        )
    if tp < 2 or counts[2] % tp:
        return settings
    log_once(f"train_batch_size {counts[2]} counts {tp} ranks that share layers as one each; a step has {counts[2] // tp} samples")
    return {**settings, "train_batch_size": counts[2] // tp}


def _degree(settings: Mapping[str, Any], section: str, name: str) -> int:
    found = settings.get(section, {})
    return _number(found, name) if isinstance(found, Mapping) else 1


def _number(section: Mapping[str, Any], name: str) -> int:
    value = section.get(name, 1)
    return value if isinstance(value, int) else 1
