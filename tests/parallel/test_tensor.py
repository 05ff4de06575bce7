"""Tensor parallelism against one process: architectures, replicated parameters, bytes, random numbers, the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parallel.hf_models import batch, build, follows, reference, settings, train
from tests.ranks import run_ranks
from zeroengine.comm import Fabric, init_distributed
from zeroengine.errors import ModelError
from zeroengine.parallel.random_regions import RandomRegion
from zeroengine.parallel.tensor import TensorParallel
from zeroengine.parallel.tensor_ops import vocabulary_cross_entropy
from zeroengine.parallel.tensor_plan import automatic_plan, plan_for
from zeroengine.zero.tensor import TensorShard, tensor_shard

pytest.importorskip("transformers")


def tensor(tp: int, stage: int, splits: bool = False) -> dict[str, Any]:
    return settings(stage, mesh={"tp": tp}, tensor_parallel={"sequence_parallel": splits})


def check(world: int, runs: list[tuple[str, dict[str, Any]]], groups: int = 1) -> None:
    got = run_ranks(train, world, runs, timeout=200)
    for i, (kind, config) in enumerate(runs):
        want = reference(kind, groups)
        for rank in range(world):
            assert follows(got[rank][i], want), (kind, config, rank, got[rank][i], want)


def test_two_ranks_share_layers() -> None:
    check(2, [
        ("llama", tensor(2, 1)), ("llama", tensor(2, 3)), ("qwen", tensor(2, 3)), ("gpt2", tensor(2, 1)), ("gpt2", tensor(2, 3)),
        ("mistral", tensor(2, 2)), ("mixtral", tensor(2, 1)), ("opt", tensor(2, 3)), ("gemma", tensor(2, 1)),
        ("bert", tensor(2, 0)),
    ])  # fmt: skip


def test_fewer_key_heads_than_ranks() -> None:
    check(2, [("mqa", tensor(2, 3))])


def test_two_ranks_with_a_split_sequence() -> None:
    check(2, [("llama", tensor(2, 1, True)), ("qwen", tensor(2, 3, True)), ("gpt2", tensor(2, 3, True))])


@pytest.mark.parametrize(
    ("run", "groups"),
    [
        (("llama", settings(1, mesh={"tp": 2, "cp": 2}, sequence_parallel={"attention": "ring"})), 1),
        (("llama", tensor(4, 1)), 1),
        (("qwen", tensor(2, 3)), 2),
    ],
    ids=["layers and sequences", "fewer key heads than ranks", "layers and data"],
)
def test_four_ranks(run: tuple[str, dict[str, Any]], groups: int) -> None:
    check(4, [run], groups)


# --- replicated parameters, initial values, checkpoints, bytes ----------------------------------------------------------


def _facts(rank: int, world: int, splits: bool, folder: str) -> dict[str, Any]:
    import zeroengine

    model = build("llama")
    if rank:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)  # rank 0's values count
    config = {**tensor(2, 1, splits), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = zeroengine.initialize(model=model, config=config)
    engine.mesh.tensor.traffic.reset()
    for step in range(3):
        loss = engine(**batch("llama", step)).loss
        if not step:
            forward = dict(engine.mesh.tensor.traffic.bytes)
        engine.backward(loss)
        if not step:
            both = dict(engine.mesh.tensor.traffic.bytes)
        engine.step()
    whole = {n: p.detach().clone() for n, p in engine.module.named_parameters() if tensor_shard(p) is None}
    full = engine.full_state_dict()
    engine.save_checkpoint(folder)
    engine.destroy()
    return {"whole": whole, "full": full, "forward": forward, "both": both, "restored": dict(model.named_parameters())}


def _one_process() -> dict[str, Tensor]:
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(**batch("llama", step), use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("splits", [False, True])
def test_replicas_stay_equal_and_everything_equals_one_process(splits: bool, tmp_path: Any) -> None:
    got = run_ranks(_facts, 2, splits, str(tmp_path), timeout=120)
    want = _one_process()
    assert got[0]["whole"].keys() and not any("proj" in n for n in got[0]["whole"])
    for name, value in got[0]["whole"].items():
        assert torch.equal(value, got[1]["whole"][name]), name
    for found in (got[0]["full"], got[0]["restored"], got[1]["restored"]):
        for name, value in want.items():
            assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6), name
    # a checkpoint of two parts loads into one process
    for name, value in run_ranks(_load, 1, str(tmp_path), timeout=60)[0].items():
        assert torch.allclose(value, want[name], rtol=1e-5, atol=1e-6), name
    # the Megatron papers' count: 4 all-reduces of b S d a layer, and the same bytes where they are split in two
    layers, item = 2, 4
    tokens = 28 if splits else 27
    reduce = 2 * (2 - 1) * 2 * tokens * 32 * item // 2  # 2 (N-1)/N of the tensor
    if not splits:
        # besides: the vocabulary of the embedding in forward, the input of the head in backward
        assert got[0]["forward"]["all_reduce"] == (2 * layers + 1) * reduce
        assert got[0]["both"]["all_reduce"] - got[0]["forward"]["all_reduce"] == (2 * layers + 1) * reduce
    else:
        assert got[0]["forward"]["reduce_scatter"] == 2 * layers * reduce // 2


def _load(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    import zeroengine

    config = {**settings(1), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = zeroengine.initialize(model=build("llama"), config=config)
    engine.load_checkpoint(folder)
    return dict(engine.full_state_dict())


def _different(rank: int, world: int) -> None:
    import zeroengine

    engine, *_ = zeroengine.initialize(model=build("llama"), config=tensor(2, 1))
    engine(**batch("llama", rank))


def test_different_batches_are_an_error() -> None:
    for outcome in run_ranks(_different, 2, timeout=90, failures=True):
        assert "must be given the same batch" in outcome.error


# --- parts --------------------------------------------------------------------------------------------------------------


def _parts(rank: int, world: int) -> dict[str, Any]:
    init_distributed(verbose=False)
    fabric = Fabric(timeout=30)
    comm = fabric.communicator("tensor")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 8, generator=generator)
    targets = torch.tensor([0, 7, -100, 3, 4, 5])
    width = 8 // world
    mine = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    loss = vocabulary_cross_entropy(mine, targets, comm)
    loss.backward()
    whole = logits.clone().requires_grad_()
    want = F.cross_entropy(whole, targets, reduction="sum")
    want.backward()
    torch.manual_seed(rank)
    region = RandomRegion(comm, torch.device("cpu"))
    region.synchronize()
    draws = [float(torch.rand(()))]
    region.enter(True)
    draws.append(float(torch.rand(())))
    region.leave()
    draws.append(float(torch.rand(())))
    fabric.close()
    error = (mine.grad - whole.grad[:, rank * width : (rank + 1) * width]).abs().max()
    return {"loss": float((loss - want).abs()), "grad": float(error), "draws": draws}


def test_vocabulary_loss_and_random_numbers() -> None:
    a, b = run_ranks(_parts, 2, timeout=60)
    assert max(a["loss"], b["loss"], a["grad"], b["grad"]) < 1e-5
    assert a["draws"][0] == b["draws"][0] and a["draws"][1] != b["draws"][1] and a["draws"][2] == b["draws"][2]


class Attention(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


def _automatic(rank: int, world: int) -> tuple[float, float]:
    init_distributed(verbose=False)
    fabric = Fabric(timeout=30)
    torch.manual_seed(3)
    model = nn.Sequential(Block(), Block())
    x = torch.randn(2, 5, 16)
    out = model(x)
    out.sum().backward()
    want = out.detach()
    del out  # a graph that is alive remembers the whole shapes
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    layers = TensorParallel(model, automatic_plan(model), fabric.communicator("tensor"), torch.device("cpu"))
    got = model(x)
    got.sum().backward()
    error = max(
        float((layers.whole(p, p.grad, n) - grads[n]).abs().max()) for n, p in model.named_parameters()
    )
    layers.remove(model)
    assert float((model(x) - want).abs().max()) < 1e-5 and type(model[0].mlp[0]) is nn.Linear
    fabric.close()
    return float((got - want).abs().max()), error


def test_automatic_plan() -> None:
    plan = automatic_plan(nn.Sequential(Block()))
    assert plan.styles["0.attention.o_proj"] == "row" and plan.styles["0.mlp.0"] == "column" and "x" not in plan.origin[:1]
    assert "attention.q_proj column" in plan.show()
    for out, grads in run_ranks(_automatic, 2, timeout=60):
        assert out < 1e-5 and grads < 1e-4


def test_automatic_plan_refuses_what_is_not_clear() -> None:
    odd = Attention()
    odd.gate = nn.Linear(16, 16)
    with pytest.raises(ModelError, match="roles of .* are not clear"):
        automatic_plan(nn.Sequential(odd))
    unknown = Attention()
    del unknown.num_heads
    with pytest.raises(ModelError, match="none of the attributes"):
        automatic_plan(nn.Sequential(unknown))
    with pytest.raises(ModelError, match="no attention"):
        plan_for(nn.Sequential(nn.Linear(4, 4)))


@pytest.mark.parametrize("sections", [1, 3])
def test_parts_join_to_the_whole(sections: int) -> None:
    whole = torch.arange(6 * 12.0).view(6, 12)
    for dim in (0, 1):
        parts = [TensorShard(dim, 2, r, sections).cut(whole) for r in range(2)]
        assert torch.equal(TensorShard(dim, 2, 0, sections).join(parts), whole)
