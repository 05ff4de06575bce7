"""An early word on memory that will not be there."""

from __future__ import annotations

import torch
from torch import nn

from zeroengine.engine.mechanism import Mechanism
from zeroengine.engine.report import measured_memory, planned_memory
from zeroengine.errors import ConfigError
from zeroengine.logging import warn_rank0
from zeroengine.offload.faults import Faults
from zeroengine.offload.limits import free_memory, hard_limits, too_much

_MIB = 1 << 20


def check_memory(module: nn.Module, mechanism: Mechanism, accumulation: int) -> None:
    """Compares what gradients and optimizer will take in a step of `accumulation` micro-batches, beyond what they have already,
    with what this process may take. Raises `ConfigError` on all ranks if a limit that is set on one does not allow it; a machine
    that has not so much free now is a warning. Collective. On an accelerator nothing is compared: its own allocator says what it
    lacks."""
    if any(b.device.type != "cpu" for b in mechanism.buckets):
        return
    planned, held = planned_memory(module, mechanism, accumulation), measured_memory(module, mechanism)
    missing = sum(max(planned[kind] - held[kind], 0) for kind in ("gradients", "optimizer", "staging"))
    what = ", ".join(f"{kind} {planned[kind] / _MIB:.0f} MiB" for kind in ("gradients", "optimizer") if planned[kind])
    room = too_much(missing, hard_limits())
    faults = Faults()
    if room is not None:
        faults.note(
            f"rank {mechanism.groups.rank}: the step will need {missing / _MIB:.0f} MiB more ({what}), and {room.limit} leaves "
            f"{max(room.nbytes, 0) / _MIB:.0f} MiB"
            + (f" to {torch.distributed.get_world_size()} ranks" if room.shared and torch.distributed.is_initialized() else "")
        )
    remedy = (
        "Let the optimizer's state live on a disk (zero_optimization.offload_optimizer: device nvme, nvme_path), use a higher stage "
        "or more ranks, or raise the limit"
    )
    faults.agree(mechanism.placement.everyone or mechanism.groups.control, "memory", remedy, ConfigError)
    free = free_memory()
    if free is not None and too_much(missing, [free]) is not None:
        warn_rank0(f"the step will need {missing / _MIB:.0f} MiB more ({what}), and the machine has {free.nbytes / _MIB:.0f} MiB")
