"""Ranks and what moves between them.

The names of torch.distributed that training scripts call are here as well, so that `import zeroengine.comm as dist`
carries such a script.
"""

from __future__ import annotations

from torch.distributed import (
    ReduceOp,
    all_gather,
    all_gather_object,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    gather,
    get_backend,
    get_rank,
    get_world_size,
    irecv,
    is_available,
    is_initialized,
    isend,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    scatter,
    send,
)

from zeroengine.comm.fabric import Fabric
from zeroengine.comm.local import LocalCommunicator
from zeroengine.comm.protocol import Communicator, Traffic, Work
from zeroengine.comm.setup import get_local_rank, init_distributed
from zeroengine.comm.torch_comm import TorchCommunicator
from zeroengine.comm.torch_names import all_gather_single as all_gather_into_tensor
from zeroengine.comm.torch_names import reduce_scatter_single as reduce_scatter_tensor

__all__ = [
    "Communicator", "Fabric", "LocalCommunicator", "ReduceOp", "TorchCommunicator", "Traffic", "Work", "all_gather",
    "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single", "barrier",
    "broadcast", "broadcast_object_list", "destroy_process_group", "gather", "get_backend", "get_local_rank",
    "get_rank", "get_world_size", "init_distributed", "irecv", "is_available", "is_initialized", "isend",
    "monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter_tensor", "scatter", "send",
]  # fmt: skip
