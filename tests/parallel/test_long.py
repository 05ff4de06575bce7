"""State passing, tiling and checkpoints on the host: the same results for less memory or fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks import run_ranks
from zeroengine.comm import Fabric, LocalCommunicator, init_distributed
from zeroengine.comm.protocol import Communicator
from zeroengine.parallel.layout import SequenceLayout
from zeroengine.parallel.state_passing import GatedLinearAttention, gated_delta_rule, gated_linear_attention
from zeroengine.parallel.tiled import TiledMLP, checkpoint_on_host, tiled_loss_sum

BATCH, HEADS, KEYS, VALUES = 2, 2, 4, 3


def inputs(length: int, starts: bool) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """q, k, v, beta, log_decay; first tokens of documents; the gradient of the output."""
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(BATCH, HEADS, length, KEYS, generator=generator) for _ in range(2))
    v, g = (torch.randn(BATCH, HEADS, length, VALUES, generator=generator) for _ in range(2))
    beta, decay = (torch.rand(BATCH, HEADS, length, generator=generator) for _ in range(2))
    fresh = torch.zeros(BATCH, length, dtype=torch.bool)
    fresh[:, [3, length // 2, length - 2]] = True
    return [q, F.normalize(k, dim=-1), v, beta, -decay], fresh if starts else None, g


def step_by_step(tensors: list[Tensor], starts: Tensor | None, delta: bool) -> Tensor:
    """The recurrence as it is written."""
    q, k, v, beta, decay = tensors
    state, outs = torch.zeros(BATCH, HEADS, KEYS, VALUES), []
    for t in range(q.shape[2]):
        a = decay[:, :, t].exp()
        if starts is not None:
            a = a * ~starts[:, None, t]
        state = a[..., None, None] * state
        key, value = k[:, :, t, :, None], v[:, :, t, None, :]
        if delta:
            b = beta[:, :, t, None, None]
            state = state + b * key @ (value - key.mT @ state)
        else:
            state = state + key @ value
        outs.append(q[:, :, t, None, :] @ state)
    return torch.cat(outs, 2)


def run(delta: bool, tensors: list[Tensor], starts: Tensor | None, comm: Communicator) -> Tensor:
    q, k, v, beta, decay = tensors
    if delta:
        return gated_delta_rule(q, k, v, beta, decay, comm, starts)
    return gated_linear_attention(q, k, v, decay, comm, starts, chunk=5)


def expected(delta: bool, starts: bool, length: int) -> list[Tensor]:
    tensors, fresh, g = inputs(length, starts)
    leaves = [t.requires_grad_() for t in tensors]
    out = step_by_step(leaves, fresh, delta)
    grads = torch.autograd.grad(out, leaves, g, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(t) if d is None else d for d, t in zip(grads, leaves, strict=True))]


def _job(rank: int, world: int, length: int) -> list[tuple[list[Tensor], int]]:
    init_distributed(verbose=False)
    fabric = Fabric(timeout=30)
    comm = fabric.communicator("sequence")
    layout = SequenceLayout(length, 1, world)
    results = []
    for delta in (False, True):
        for starts in (False, True):
            tensors, fresh, g = inputs(length, starts)
            leaves = [layout.shard(t, rank, 2).requires_grad_() for t in tensors]
            comm.traffic.reset()
            out = run(delta, leaves, None if fresh is None else layout.shard(fresh, rank), comm)
            sent = comm.traffic.bytes["all_gather"]
            grads = torch.autograd.grad(out, leaves, layout.shard(g, rank, 2), allow_unused=True)
            found = [out.detach(), *(torch.zeros_like(t) if d is None else d for d, t in zip(grads, leaves, strict=True))]
            results.append((found, sent))
    fabric.close()
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_states_cross_ranks(world: int) -> None:
    length = 24
    got = run_ranks(_job, world, length, timeout=120)
    twice = run_ranks(_job, world, 2 * length, timeout=120)
    layout = SequenceLayout(length, 1, world)
    for i, (delta, starts) in enumerate(((False, False), (False, True), (True, False), (True, True))):
        for j, want in enumerate(expected(delta, starts, length)):
            whole = layout.unshard([got[r][i][0][j] for r in range(world)], 2)
            assert (whole - want).norm() <= 1e-5 * want.norm() + 1e-6, (delta, starts, j)
        maps = BATCH * HEADS * ((KEYS * KEYS if delta else 1) + KEYS * VALUES) * 4
        assert got[0][i][1] == (world - 1) * maps == twice[0][i][1]  # the same at twice the length


@pytest.mark.parametrize("delta", [False, True])
def test_one_rank(delta: bool) -> None:
    tensors, fresh, _ = inputs(17, True)
    out = run(delta, tensors, fresh, LocalCommunicator("one"))
    assert torch.allclose(out, step_by_step(tensors, fresh, delta), atol=1e-5)


def test_layer() -> None:
    layer = GatedLinearAttention(8, 2, LocalCommunicator("one"))
    x = torch.randn(2, 9, 8)
    changed = x.clone()
    changed[:, 6] += 1
    a, b = layer(x), layer(changed)
    assert torch.equal(a[:, :6], b[:, :6]) and not torch.allclose(a[:, 6:], b[:, 6:])
    with pytest.raises(ValueError, match="3 heads do not divide"):
        GatedLinearAttention(8, 3, LocalCommunicator("one"))


def gradients(function: Callable[[Tensor], Tensor], x: Tensor, module: nn.Module) -> list[Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = function(x)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.allclose(x, y, rtol=1e-5, atol=1e-5) for x, y in zip(a, b, strict=True))


def test_tiles_change_nothing() -> None:
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    x = torch.randn(2, 11, 8)
    assert same(gradients(TiledMLP(mlp, 4), x, mlp), gradients(mlp, x, mlp))
    head = nn.Linear(8, 20)
    targets = torch.randint(0, 20, (2, 11))
    targets[0, :4] = -100
    whole = gradients(lambda h: F.cross_entropy(head(h).flatten(0, 1), targets.flatten(), reduction="sum"), x, head)
    assert same(gradients(lambda h: tiled_loss_sum(h, head, targets, 3), x, head), whole)
    with pytest.raises(ValueError, match="a tile of 0 tokens"):
        tiled_loss_sum(x, head, targets, 0)


def test_logits_are_never_whole() -> None:
    seen: list[int] = []
    head = nn.Linear(8, 20)
    head.register_forward_hook(lambda m, a, out: seen.append(out.shape[1]))
    gradients(lambda h: tiled_loss_sum(h, head, torch.zeros(2, 11, dtype=torch.int64), 3), torch.randn(2, 11, 8), head)
    assert max(seen) == 3 and len(seen) == 8  # four tiles, twice


def test_checkpoint_on_host() -> None:
    block: Any = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    x = torch.randn(2, 4, 8)
    torch.manual_seed(1)
    want = gradients(block, x, block)
    torch.manual_seed(1)
    assert same(gradients(lambda t: checkpoint_on_host(block, t), x, block), want)
