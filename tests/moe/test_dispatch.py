"""What travels: bytes, messages between nodes, copies of busy experts, types on the wire."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.ranks import run_ranks

HIDDEN, TOKENS, EXPERTS = 16, 400, 8


class Counting:
    """A communicator that counts the messages with rows to ranks of another node."""

    def __init__(self, comm: Any, per_node: int) -> None:
        self.comm, self.per_node, self.messages, self.sent = comm, per_node, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def all_to_all(self, output: Any, input: Any, subject: str, *, output_splits: Any, input_splits: Any) -> Any:
        here = self.comm.ranks[self.comm.rank] // self.per_node
        for rank, size in zip(self.comm.ranks, input_splits, strict=True):
            if rank // self.per_node != here and size:
                self.messages += 1
                self.sent += size
        return self.comm.all_to_all(output, input, subject, output_splits=output_splits, input_splits=input_splits)


def layer(k: int) -> Any:
    from zeroengine.moe import ExpertBank, MoE

    torch.manual_seed(1)
    return MoE(HIDDEN, ExpertBank(EXPERTS, HIDDEN, 24), k=k, drop_tokens=False)


def tokens(world: int) -> torch.Tensor:
    return torch.randn(world, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))


def _hops(rank: int, world: int, two: bool) -> dict[str, Any]:
    from zeroengine.comm import Fabric, init_distributed
    from zeroengine.moe import ExpertGroup
    from zeroengine.moe.group import Batch, Hops, make_hops

    init_distributed()
    fabric = Fabric("cpu")
    everybody = tuple(range(world))
    direct = Counting(fabric.communicator("experts", everybody), 2)
    hops = make_hops(fabric, everybody, 2)
    inside, between = Counting(hops.inside, 2), Counting(hops.between, 2)
    group = ExpertGroup(
        direct, fabric.communicator("control", everybody, control=True),
        Batch.over(fabric.communicator("batch", everybody, control=True)),
        Hops(inside, between) if two else None,
    )  # type: ignore[arg-type]  # fmt: skip
    model = layer(2)
    model.sparse.spread(group, "layer")
    x = tokens(world)[rank].requires_grad_()
    out, _, _ = model(x)
    out.square().sum().backward()
    found = {
        "out": out.detach(), "grad": x.grad, "messages": direct.messages + inside.messages + between.messages,
        "sent": direct.sent + inside.sent + between.sent,
    }  # fmt: skip
    fabric.close()
    return found


def test_two_hops_move_the_same_tokens_in_fewer_messages() -> None:
    one, two = run_ranks(_hops, 4, False, timeout=60), run_ranks(_hops, 4, True, timeout=60)
    model = layer(2)
    x = tokens(4).requires_grad_()
    out, _, _ = model(x)
    out.square().sum().backward()
    for rank in range(4):
        for got in (one, two):
            assert torch.allclose(got[rank]["out"], out[rank], atol=1e-6) and torch.allclose(got[rank]["grad"], x.grad[rank], atol=1e-5)
        assert torch.equal(one[rank]["out"], two[rank]["out"])
        # out and back, forward and backward: to each of two ranks of the other node, or by one message to the node
        assert one[rank]["messages"] == 4 * 2 and two[rank]["messages"] == 4 * 1
    assert sum(r["sent"] for r in one) == sum(r["sent"] for r in two)


def _bytes(rank: int, world: int, wire: str) -> dict[str, Any]:
    import zeroengine

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = layer(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out, aux, _ = self.moe(x)
            self.seen = out.detach()
            return out.float().square().mean() + 0.01 * aux

    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "mesh": {"ep": world},
        "bf16": {"enabled": wire == "bf16"}, "moe": {"dispatch_dtype": "same" if wire == "bf16" else wire}, "steps_per_print": None,
    }  # fmt: skip
    engine, *_ = zeroengine.initialize(model=model, config=config)
    x = tokens(world)[rank].requires_grad_()
    comm = engine.experts.group.tokens
    comm.traffic.reset()
    loss = engine(x)
    engine.backward(loss)
    index = model.moe.sparse.router(x.detach().to(next(model.parameters()).dtype)).index
    local = int((index // (EXPERTS // world) == rank).sum())
    return {"bytes": comm.traffic.bytes["all_to_all"], "local": local, "out": model.seen.float()}


def test_bytes_on_the_wire_are_the_formula() -> None:
    got = run_ranks(_bytes, 2, "bf16", timeout=60)
    k, local = 2, sum(r["local"] for r in got)
    assert sum(r["bytes"] for r in got) == 8 * HIDDEN * (k * 2 * TOKENS - local)


def test_tokens_in_eight_bits() -> None:
    same = run_ranks(_bytes, 2, "same", timeout=60)
    fp8 = run_ranks(_bytes, 2, "fp8", timeout=60)
    for a, b in zip(same, fp8, strict=True):
        assert float((a["out"] - b["out"]).abs().max()) <= 0.1 * float(a["out"].abs().max())
        assert float((a["out"] - b["out"]).square().mean().sqrt()) <= 0.05 * float(a["out"].square().mean().sqrt())
        assert not torch.equal(a["out"], b["out"])
    rows = 2 * 2 * TOKENS - sum(r["local"] for r in fp8)
    assert sum(r["bytes"] for r in fp8) == rows * (HIDDEN + 4 + 3 * 2 * HIDDEN)
    assert sum(r["bytes"] for r in same) == rows * 16 * HIDDEN


def _skewed(rank: int, world: int, copies: bool) -> dict[str, Any]:
    import zeroengine

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = layer(1)
            with torch.no_grad():
                self.moe.sparse.router.weight[:2] += 0.3

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.moe(x)[0].square().mean()

    config = {
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "mesh": {"ep": world},
        "zero_optimization": {"stage": 3}, "moe": {"copies": copies}, "steps_per_print": None,
    }  # fmt: skip
    engine, *_ = zeroengine.initialize(model=Net(), config=config)
    losses = []
    for step in range(3):
        loss = engine((tokens(world)[rank] + 1.0) * (1 + 0.1 * step))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    layers = engine.expert_statistics()
    engine.destroy()
    return {"losses": losses, "layer": layers["moe.sparse"], "weight": engine.module.moe.sparse.experts.down_proj.detach().clone()}


def test_copies_make_all_ranks_compute_alike() -> None:
    plain, copied = run_ranks(_skewed, 4, False, timeout=60), run_ranks(_skewed, 4, True, timeout=60)
    assert plain[0]["layer"].skew > 2.0
    assert copied[0]["layer"].skew <= 1.01
    assert plain[0]["layer"].load == copied[0]["layer"].load and sum(plain[0]["layer"].load) == 4 * TOKENS
    for a, b in zip(plain, copied, strict=True):
        assert torch.allclose(torch.tensor(a["losses"]), torch.tensor(b["losses"]), rtol=1e-6)
        assert torch.allclose(a["weight"], b["weight"], atol=1e-6)
