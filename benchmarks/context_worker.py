"""The job of a process in `benchmarks.context`: steps of a small causal transformer over a sequence that all ranks share."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroengine.comm import Fabric, init_distributed
from zeroengine.parallel.group import SequenceGroup, make_group
from zeroengine.parallel.layout import SequenceLayout
from zeroengine.parallel.masks import AttentionMask, attention_work


class Block(nn.Module):
    """Attention with grouped key heads and a gated MLP, both before a norm."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.dim = heads, key_heads, width // heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv = nn.Linear(width, (heads + 2 * key_heads) * self.dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 6 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, group: SequenceGroup, layout: SequenceLayout) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.key_heads, self.key_heads], 1)
        x = x + self.out(group.attention(q, k, v, layout, AttentionMask()).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class ContextJob:
    """`zigzag`, `contiguous`: a ring with that placement; `ulysses`: heads. Forward and backward of one sequence in fp32;
    gradients of weights are not reduced, which is the same for all."""

    def __init__(self, length: int, width: int, heads: int, key_heads: int, layers: int):
        init_distributed(verbose=False)
        fabric = Fabric()
        ranks = range(fabric.world_size)
        self.length, self.barrier = length, fabric.communicator("benchmark")
        self.groups = {
            "zigzag": make_group(fabric, ranks, 1, name="zigzag"),
            "contiguous": make_group(fabric, ranks, 1, zigzag=False, name="contiguous"),
            "ulysses": make_group(fabric, ranks, len(ranks), name="ulysses"),
        }
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(width, heads, key_heads) for _ in range(layers)])
        self.x = torch.randn(1, length, width)

    def ready(self) -> dict[str, Any]:
        return {"moves_over": getattr(self.barrier, "moves_over", "nothing"), "torch": torch.__version__}

    def turn(self, system: str, steps: int) -> dict[str, Any]:
        """Seconds of each step, from a barrier to the end on this rank; pairs of tokens that this rank's causal attention
        computes for a head; bytes that autograd keeps at the end of forward, where activation memory is at its peak."""
        group = self.groups[system]
        layout = group.layout(self.length)
        x = layout.shard(self.x, group.rank).contiguous()
        seconds, kept = [], 0
        for _ in range(steps):
            self.blocks.zero_grad()
            self.barrier.barrier("start")
            start = time.perf_counter()
            kept = self._step(x, group, layout)
            seconds.append(time.perf_counter() - start)
        pairs = attention_work(AttentionMask(), layout)[group.ring.rank] // group.heads.size
        return {"seconds": seconds, "pairs": pairs, "kept": kept}

    def _step(self, x: Tensor, group: SequenceGroup, layout: SequenceLayout) -> int:
        storages: dict[int, int] = {}
        weights = {p.untyped_storage().data_ptr() for p in self.blocks.parameters()}

        def note(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            out = x
            for block in self.blocks:
                out = block(out, group, layout)
        out.sum().backward()
        return sum(storages.values())
