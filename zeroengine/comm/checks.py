"""Checks of arguments shared by all communicators, and the traffic formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from torch import Tensor

from zeroengine.comm.protocol import ReduceOp

REDUCTIONS: tuple[str, ...] = get_args(ReduceOp)


def require(condition: bool, what: str, name: str, subject: str) -> None:
    if not condition:
        raise ValueError(f"{what} (communicator {name!r}, subject {subject!r})")


def flat(name: str, subject: str, *tensors: Tensor) -> None:
    for t in tensors:
        if not t.is_contiguous():
            raise ValueError(
                f"{subject!r}: communicator {name!r} moves contiguous tensors, got shape {tuple(t.shape)}, "
                f"stride {t.stride()}; call .contiguous() first"
            )


def check_gather(name: str, size: int, full: Tensor, shard: Tensor, subject: str) -> None:
    flat(name, subject, full, shard)
    require(full.dtype == shard.dtype, f"all_gather of {shard.dtype} into {full.dtype}", name, subject)
    require(
        full.numel() == size * shard.numel(),
        f"all_gather of {shard.numel()} elements from each of {size} ranks into {full.numel()}",
        name,
        subject,
    )


def check_reduce_scatter(name: str, size: int, shard: Tensor, full: Tensor, scale: float, subject: str) -> None:
    flat(name, subject, full, shard)
    require(
        full.numel() == size * shard.numel(),
        f"reduce_scatter of {full.numel()} elements over {size} ranks into {shard.numel()}",
        name,
        subject,
    )
    check_scale(name, shard, scale, subject)


def check_scale(name: str, tensor: Tensor, scale: float, subject: str, op: str = "sum") -> None:
    require(op in REDUCTIONS, f"reduction {op!r} is none of {', '.join(REDUCTIONS)}", name, subject)
    require(scale == 1.0 or op == "sum", f"a scale of {scale} belongs to sum, not to {op}", name, subject)
    require(
        scale == 1.0 or tensor.is_floating_point() or tensor.is_complex(),
        f"a scale of {scale} on {tensor.dtype}",
        name,
        subject,
    )


def check_all_to_all(
    name: str,
    size: int,
    output: Tensor,
    input: Tensor,
    subject: str,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
) -> None:
    flat(name, subject, output, input)
    require(output.dtype == input.dtype, f"all_to_all of {input.dtype} into {output.dtype}", name, subject)
    require((output_splits is None) == (input_splits is None), "all_to_all needs both splits or none", name, subject)
    for side, tensor, splits in (("output", output, output_splits), ("input", input, input_splits)):
        if splits is None:
            fits = tensor.numel() % size == 0
        else:
            fits = len(splits) == size and sum(splits) == tensor.numel() and min(splits) >= 0
        require(fits, f"all_to_all: {side} of {tensor.numel()} elements, {size} ranks, splits {splits}", name, subject)
    require(
        input_splits is not None or output.numel() == input.numel(),
        f"all_to_all of {input.numel()} elements into {output.numel()}",
        name,
        subject,
    )


def check_peer(name: str, size: int, rank: int, peer: int, subject: str) -> None:
    require(0 <= peer < size, f"group rank {peer} is outside 0..{size - 1}", name, subject)
    require(peer != rank, f"rank {rank} cannot send to or receive from itself", name, subject)


def sent_share(nbytes: int, size: int) -> int:
    """(N-1)/N of `nbytes`, the bytes a rank sends in an all_gather, reduce_scatter, broadcast or all_to_all."""
    return nbytes * (size - 1) // size


def all_reduce_share(tensor: Tensor, size: int) -> int:
    """Bytes a rank sends in an all_reduce: it is cut into equal parts, padded, which are reduced and gathered."""
    padded = -(-tensor.numel() // size) * size * tensor.element_size()
    return 2 * sent_share(padded, size)


def all_to_all_share(input: Tensor, splits: Sequence[int] | None, rank: int, size: int) -> int:
    """Bytes that leave a rank in an all_to_all: all of `input` but its own block."""
    kept = input.numel() // size if splits is None else splits[rank]
    return (input.numel() - kept) * input.element_size()


def exchange_share(values: Tensor, size: int) -> int:
    """Bytes a rank sends in an exchange of control values, a row from each."""
    return sent_share(values.nbytes * size, size)
