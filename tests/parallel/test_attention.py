"""Ulysses, ring and both against attention in one process: outputs, gradients, bytes, balance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tests.ranks import run_ranks
from zeroengine.comm import Fabric, init_distributed
from zeroengine.parallel.group import SequenceGroup, alone, make_group
from zeroengine.parallel.kernels import CpuFlash, Twin
from zeroengine.parallel.layout import SequenceLayout, Span
from zeroengine.parallel.masks import AttentionMask, Kind, attention_work, documents_from_lengths
from zeroengine.parallel.ulysses import HeadPlan
from zeroengine.sequence.layer import DistributedAttention
from zeroengine.sequence.ring import ring_attention, ring_layout

Case = dict[str, Any]
BATCH, DIM = 2, 8


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output, the same in every process; `rounded`: values that 16 bits can hold."""
    generator = torch.Generator().manual_seed(3)
    heads, keys, length, dtype = case["heads"], case["keys"], case["length"], case.get("dtype", torch.float32)
    shapes = [(BATCH, heads, length, DIM), (BATCH, keys, length, DIM), (BATCH, keys, length, DIM), (BATCH, heads, length, DIM)]
    made = [torch.randn(s, generator=generator) for s in shapes]
    q, k, v, g = (t.bfloat16().to(dtype) if case.get("rounded") else t.to(dtype) for t in made)
    return q, k, v, g


def mask_of(case: Case) -> AttentionMask:
    documents = documents_from_lengths(case["documents"]) if "documents" in case else None
    return AttentionMask(case.get("causal", True), case.get("window"), documents)


def dense(case: Case) -> list[Tensor]:
    """Output and gradients of one process: plain SDPA with the mask written out."""
    q, k, v, g = (t.float() for t in inputs(case))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    i = torch.arange(case["length"])
    ok = torch.ones(len(i), len(i), dtype=torch.bool)
    if case.get("causal", True):
        ok &= i[None] <= i[:, None]
    if "window" in case:
        ok &= (i[:, None] - i[None]).abs() < case["window"]
    if "documents" in case:
        d = documents_from_lengths(case["documents"])[0]
        ok &= d[None] == d[:, None]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=ok, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


Whole = list[Tensor]


def attention(case: Case, group: SequenceGroup) -> Whole:
    """This rank's output and gradients. With `layers`, the output goes on as the queries, keys and values of the next."""
    layout = group.layout(case["length"])
    q, k, v, g = (layout.shard(t, group.rank, 2) for t in inputs(case))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    mask, out = mask_of(case).over(layout), group.attention(*leaves, layout, mask_of(case).over(layout))
    for _ in range(case.get("layers", 1) - 1):
        out = out + group.attention(out, out, out, layout, mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


def distributed(cases: list[Case], fabric: Fabric) -> list[Whole]:
    """Per case the output and the gradients, put together from all ranks."""
    groups: dict[tuple[int, bool], SequenceGroup] = {}
    results = []
    for case in cases:
        way = case["ulysses"], case.get("zigzag", True)
        if way not in groups:
            groups[way] = make_group(fabric, range(fabric.world_size), *way, name=f"sequence {way}")
        group, layout = groups[way], groups[way].layout(case["length"])
        whole = []
        for t in attention(case, group):
            parts = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(group.size)]
            dist.all_gather(parts, t.contiguous())
            whole.append(layout.unshard(parts, 2))
        results.append(whole)
    return results


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))


CASES: list[Case] = [
    {"heads": 4, "keys": 4, "length": 32},
    {"heads": 4, "keys": 4, "length": 29, "causal": False},  # padding must be hidden
    {"heads": 8, "keys": 2, "length": 31},
    {"heads": 8, "keys": 2, "length": 40, "window": 7},
    {"heads": 8, "keys": 2, "length": 37, "window": 5, "causal": False},
    {"heads": 6, "keys": 3, "length": 33, "documents": [5, 17, 11]},
    {"heads": 5, "keys": 1, "length": 26, "documents": [13, 13], "causal": False},
    {"heads": 3, "keys": 3, "length": 9},
    {"heads": 6, "keys": 2, "length": 48, "documents": [20, 28], "window": 6},
]


ROUNDED: Case = {"heads": 2, "keys": 2, "length": 64, "dtype": torch.bfloat16}
DEPTHS = (1, 8)


def chosen(world: int) -> list[Case]:
    """On two ranks everything; on more every mask once for each way to split them. All with a case in 16 bits at the end."""
    rounded = [{**ROUNDED, "ulysses": 1, "layers": n} for n in DEPTHS]
    if world == 2:
        return [{**c, "ulysses": u, "zigzag": z} for c in CASES for u, z in ((1, True), (1, False), (2, True))] + rounded
    if world == 4:
        ways = [(1, True), (2, True), (4, True), (1, False)]
        return [{**CASES[i], "ulysses": u, "zigzag": z} for u, z in ways for i in (1, 2, 3, 5, 6)] + rounded
    return [{**CASES[i], "ulysses": u} for u in (1, 2, 4, 8) for i in (2, 3, 5)] + rounded


@dataclass
class Found:
    """What the ranks of one launch found."""

    whole: list[Whole]
    bytes: dict[str, tuple[int, int]]
    public: list[float]


def everything(rank: int, world: int) -> Found:
    init_distributed(verbose=False)
    fabric = Fabric(timeout=60)
    found = Found(distributed(chosen(world), fabric), {}, [])
    if world < 8:
        ring, heads = (make_group(fabric, range(world), n, name=f"bytes {n}") for n in (1, world))
        found.bytes = {
            "ring": sent(ring, 4, 2), "heads": sent(heads, 8, 4), "two key heads": sent(heads, 8, 2),
            "longer": sent(ring, 4, 2, 64),
        }  # fmt: skip
        found.public = public(fabric)
    fabric.close()
    return found


@pytest.fixture(scope="module", params=[2, 4, 8])
def world(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@cache
def launched(world: int) -> list[Found]:
    return run_ranks(everything, world, timeout=240)


def test_equals_one_process(world: int) -> None:
    for case, value in zip(chosen(world), launched(world)[world // 2].whole, strict=True):
        if "dtype" not in case:
            assert distance(value, dense(case)) <= 1e-5, case


@pytest.mark.parametrize("depth", DEPTHS)
def test_error_does_not_grow_with_the_ring(depth: int) -> None:
    """O12, in 16 bits: against fp32, forward and backward. Roundings differ with the pieces, so errors scatter."""
    case: Case = {**ROUNDED, "layers": depth}
    want = attention({**case, "dtype": torch.float32, "rounded": True}, alone())
    errors = {1: distance(attention(case, alone()), want)}
    for n in (2, 4, 8):
        errors[n] = distance(launched(n)[0].whole[-len(DEPTHS) + DEPTHS.index(depth)], want)
    assert errors[1] < {1: 5e-3, 8: 8e-2}[depth] and max(errors.values()) < 1.5 * errors[1], errors


# --- bytes ------------------------------------------------------------------------------------------------------------


def sent(group: SequenceGroup, heads: int, keys: int, length: int = 32) -> tuple[int, int]:
    """Bytes that this rank sends in forward, and in backward."""
    layout = group.layout(length)
    q, k, v, g = (layout.shard(t, group.rank, 2) for t in inputs({"heads": heads, "keys": keys, "length": length}))
    counters = [c.traffic for c in (group.heads, group.ring)]
    before = sum(c.bytes["all_to_all"] for c in counters)
    out = group.attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), layout, AttentionMask())
    middle = sum(c.bytes["all_to_all"] for c in counters)
    out.backward(g)
    return middle - before, sum(c.bytes["all_to_all"] for c in counters) - middle


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_the_formulas(ranks: int) -> None:
    """Ulysses falls with the degree, a ring moves the same whatever it is but for the share that stays; a key head travels once
    to each rank that reads it."""
    item = 4
    for found in launched(ranks):
        shard = 2 * BATCH * 2 * DIM * (32 // ranks) * item  # K and V of two heads
        assert found.bytes["ring"] == ((ranks - 1) * shard, (ranks - 1) * shard + ranks * shard)  # fp32: accumulators are as wide
        assert found.bytes["longer"] == tuple(2 * n for n in found.bytes["ring"])
        head = BATCH * (32 // ranks) * DIM * item
        assert found.bytes["heads"] == ((ranks - 1) * head * (8 + 2 * 4 + 8) // ranks,) * 2
        queries, keys = 8 // ranks, max(2 // ranks, 1)  # of each other rank
        assert found.bytes["two key heads"][0] == (ranks - 1) * head * (queries + 2 * keys + queries)


# --- DistributedAttention and ring_attention ---------------------------------------------------------------------------


def public(fabric: Fabric) -> list[float]:
    """Errors of `DistributedAttention` in three orders of dimensions, and of `ring_attention`."""
    comm, rank, world = fabric.communicator("sequence"), fabric.rank, fabric.world_size
    case = {"heads": 12, "keys": 3, "length": 30}
    q, k, v, _ = inputs(case)
    lengths = [9, 7, 8, 6] if world == 4 else [13, 17]
    start = sum(lengths[:rank])
    mine = [t[:, :, start : start + lengths[rank]] for t in (q, k, v)]
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[:, :, start : start + lengths[rank]]
    errors = []
    for order, scatter, gather in (((2, 0, 1, 3), 2, 0), ((0, 2, 1, 3), 2, 1), ((0, 1, 2, 3), 1, 2)):
        seen: list[torch.Size] = []

        def local(a: Tensor, b: Tensor, c: Tensor, order: tuple[int, ...] = order, seen: list[torch.Size] = seen) -> Tensor:
            seen.append(a.shape)
            back = [order.index(i) for i in range(4)]
            a, b, c = (t.permute(back) for t in (a, b, c))
            b, c = (t.repeat_interleave(a.shape[1] // t.shape[1], 1) for t in (b, c))
            return F.scaled_dot_product_attention(a, b, c, is_causal=True).permute(order)

        layer = DistributedAttention(local, comm, scatter, gather)
        got = layer(*(t.permute(order) for t in mine), lengths=lengths)
        errors.append(float((got - want.permute(order)).abs().max()))
        assert seen[0][scatter] == 12 // world and seen[0][gather] == 30
    layout = ring_layout(30, comm)
    parts = [torch.empty(BATCH, 12, layout.local, DIM) for _ in range(world)]
    dist.all_gather(parts, ring_attention(*(layout.shard(t, rank, 2) for t in (q, k, v)), comm, layout).contiguous())
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    errors.append(float((layout.unshard(parts, 2) - want).abs().max()))
    return errors


@pytest.mark.parametrize("ranks", [2, 4])
def test_public_names(ranks: int) -> None:
    for found in launched(ranks):
        assert max(found.public) < 1e-5


def test_heads_belong_to_one_attention() -> None:
    """O05: who has which heads depends on that attention's heads alone, whatever other models there are."""
    HeadPlan(3, 3, 4)
    plan = HeadPlan(12, 12, 4)
    assert [len(plan.queries(r)) for r in range(4)] == [3, 3, 3, 3]
    assert [list(HeadPlan(8, 2, 4).keys(r)) for r in range(4)] == [[0], [0], [1], [1]]


def test_arguments_are_checked() -> None:
    from zeroengine.comm import LocalCommunicator

    comm = LocalCommunicator("one")
    with pytest.raises(ValueError, match="scatter_idx 1 .* gather_idx 1"):
        DistributedAttention(lambda q, k, v: q, comm, 1, 1)
    q = torch.randn(1, 4, 6, 8)
    with pytest.raises(ValueError, match="ring member 0 holds 8"):
        ring_attention(q, q, q, comm, ring_layout(8, comm))
    with pytest.raises(ValueError, match="4 query heads over 3 key"):
        ring_attention(q, q[:, :3], q[:, :3], comm)
    with pytest.raises(ValueError, match="neither 'zigzag' nor"):
        ring_layout(8, comm, "spiral")  # type: ignore[arg-type]


# --- layouts, masks, kernels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 24, 61])
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (3, 1), (1, 3), (2, 2), (4, 2)])
@pytest.mark.parametrize("zigzag", [True, False])
def test_layout_is_a_partition(length: int, ring: int, ulysses: int, zigzag: bool) -> None:
    layout = SequenceLayout(length, ring, ulysses, zigzag)
    whole = torch.arange(length)[None]
    parts = [layout.shard(whole, r, fill=-1) for r in range(layout.size)]
    assert all(p.shape[1] == layout.local for p in parts)
    assert torch.equal(layout.unshard(parts), whole)


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_zigzag_balances_causal_work(ring: int) -> None:
    zigzag = attention_work(AttentionMask(), SequenceLayout(64 * ring, ring))
    contiguous = attention_work(AttentionMask(), SequenceLayout(64 * ring, ring, zigzag=False))
    assert max(zigzag) <= 1.01 * min(zigzag)
    assert max(contiguous) > 2 * min(contiguous)
    total = 64 * ring * (64 * ring + 1) // 2
    assert sum(zigzag) == sum(contiguous) == total  # nothing is computed that is masked


def test_blocks_outside_the_mask_are_not_computed() -> None:
    layout = SequenceLayout(4096, 1)
    whole = layout.spans(0)
    window = AttentionMask(window=16)
    assert sum(b.work for b in window.blocks(whole, whole)) < 4096 * 1100
    packed = AttentionMask(documents=documents_from_lengths([1024] * 4))
    blocks = packed.blocks(whole, whole)
    assert sum(b.work for b in blocks) <= 4096 * 2560
    ring = SequenceLayout(4096, 4, zigzag=False)
    assert not packed.blocks(ring.spans(3), ring.spans(0))
    assert [b.kind for b in packed.blocks(ring.spans(3), ring.spans(3))] == [Kind.DIAGONAL]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", list(Kind))
def test_kernels_agree_with_their_twin(dtype: torch.dtype, kind: Kind) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = columns = 12
    q, k, v, g = (torch.randn(2, h, rows, 8, generator=generator).to(dtype) for h in (4, 2, 2, 4))
    allowed = torch.rand(2, 1, rows, columns, generator=generator) < 0.5 if kind is Kind.MASKED else None
    if allowed is not None:
        allowed[:, :, 3] = False  # a row without keys
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    fast, twin = CpuFlash(), Twin()
    out, lse = fast.forward(q, k, v, 0.3, kind, allowed)
    out_twin, lse_twin = twin.forward(q, k, v, 0.3, kind, allowed)
    assert torch.allclose(out, out_twin, atol=tolerance) and torch.allclose(lse, lse_twin, atol=tolerance)
    if allowed is not None:
        assert bool((lse[:, :, 3] == -math.inf).all()) and not out[:, :, 3].any()
    for a, b in zip(
        fast.backward(g, q, k, v, out, lse, 0.3, kind, allowed),
        twin.backward(g, q, k, v, out_twin, lse_twin, 0.3, kind, allowed), strict=True,
    ):  # fmt: skip
        assert torch.allclose(a.to(dtype), b.to(dtype), atol=10 * tolerance)


def test_documents_do_not_see_each_other() -> None:
    """O06: a changed token of one document changes nothing in the other, with a window and padding as well."""
    group, layout = alone(), SequenceLayout(24)
    documents = documents_from_lengths([10, 10, 4])
    documents[documents == 2] = -1
    q, k, v = (torch.randn(1, 2, 24, 8) for _ in range(3))
    for window in (None, 4):
        mask = AttentionMask(True, window, documents)
        before = group.attention(q, k, v, layout, mask)
        k2, v2 = k.clone(), v.clone()
        k2[:, :, 3], v2[:, :, 3] = 9.0, 9.0
        after = group.attention(q, k2, v2, layout, mask)
        assert torch.equal(before[:, :, 10:], after[:, :, 10:]) and not torch.equal(before[:, :, :10], after[:, :, :10])
        assert not before[:, :, 20:].any()
    assert mask.blocks((Span(10, 10),), (Span(0, 10),)) == ()
