"""Tensor parallelism against one process: architectures, replicated parameters, bytes, random numbers, the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.nn import functional as F

from tests.parallel.hf_models import STEPS, batch, build, reference, settings, tensor
from tests.ranks import run_ranks
from zeroengine.comm import Fabric, init_distributed
from zeroengine.errors import ModelError
from zeroengine.parallel.random_regions import RandomRegion
from zeroengine.parallel.tensor import TensorParallel
from zeroengine.parallel.tensor_plan import automatic_plan, plan_for
from zeroengine.parallel.vocabulary import vocabulary_cross_entropy
from zeroengine.utils import safe_get_full_fp32_param
from zeroengine.zero.tensor import TensorShard, tensor_shard, whole_value

pytest.importorskip("transformers")


# --- replicated parameters, initial values, checkpoints, bytes ----------------------------------------------------------


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
REPLICATED = [(kind, splits) for kind in ("llama", "gpt2", "mqa") for splits in (False, True)]


def _facts(rank: int, world: int) -> list[dict[str, Any]]:
    """For each model: what every rank holds whole after three steps, all of it, the bytes sent, what is left behind."""
    import zeroengine

    found = []
    for kind, splits in REPLICATED:
        model = build(kind)
        if rank:
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1.0)  # rank 0's values count
        engine, *_ = zeroengine.initialize(model=model, config={**tensor(2, 1, splits), **SGD})
        engine.mesh.tensor.traffic.reset()
        sent = []
        for step in range(3):
            loss = engine(**batch(kind, step)).loss
            sent.append(dict(engine.mesh.tensor.traffic.bytes))
            engine.backward(loss)
            sent.append(dict(engine.mesh.tensor.traffic.bytes))
            engine.step()
        engine.check_replicas()
        whole = {n: p.detach().clone() for n, p in engine.module.named_parameters() if tensor_shard(p) is None}
        name = next(n for n, p in model.named_parameters() if tensor_shard(p) is not None)
        fp32 = safe_get_full_fp32_param(dict(model.named_parameters())[name])
        full = engine.full_state_dict()
        engine.destroy()
        restored = {n: p.detach() for n, p in model.named_parameters()}
        assert torch.equal(fp32, restored[name])
        found.append({"whole": whole, "full": full, "forward": sent[0], "both": sent[1], "restored": restored})
    return found


def _one_process(kind: str) -> dict[str, Tensor]:
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(**batch(kind, step), use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def facts() -> list[list[dict[str, Any]]]:
    return run_ranks(_facts, 2, timeout=180)


@pytest.mark.parametrize("i", range(len(REPLICATED)), ids=[f"{k}{'+sp' * s}" for k, s in REPLICATED])
def test_replicas_stay_equal_and_everything_equals_one_process(facts: list[list[dict[str, Any]]], i: int) -> None:
    """P01: norms, biases behind row-parallel layers, shared key heads."""
    a, b = facts[0][i], facts[1][i]
    kind, _ = REPLICATED[i]
    held = {"llama": "norm", "gpt2": "c_proj.bias", "mqa": "k_proj"}[kind]
    assert any(held in n for n in a["whole"]) and len(a["whole"]) < len(a["restored"])
    for name, value in a["whole"].items():
        assert torch.equal(value, b["whole"][name]), name
    for found in (a["full"], a["restored"], b["restored"]):
        for name, value in _one_process(kind).items():
            assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("splits", [False, True])
def test_bytes_are_those_of_the_megatron_papers(facts: list[list[dict[str, Any]]], splits: bool) -> None:
    """4 all-reduces of b S d a layer and micro-batch; where the sequence is split, each in its two halves: the same bytes."""
    sent = facts[0][REPLICATED.index(("llama", splits))]
    layers, item = 2, 4
    tokens = 28 if splits else 27  # padded to an even number
    reduce = 2 * (2 - 1) * 2 * tokens * 32 * item // 2  # 2 (N-1)/N of [2, tokens, 32]
    forward, both = sent["forward"], sent["both"]
    if not splits:
        # besides: the vocabulary of the embedding in forward, the input of the head in backward
        assert forward["all_reduce"] == (2 * layers + 1) * reduce
        assert both["all_reduce"] - forward["all_reduce"] == (2 * layers + 1) * reduce
        return
    half = reduce // 2
    assert forward["reduce_scatter"] == 2 * layers * half and both["reduce_scatter"] == 4 * layers * half
    whole = 2 * 27 * 64 * item // 2  # logits
    assert forward["all_gather"] == (2 * layers + 1) * half + whole  # and the end of the split part
    assert both["all_gather"] - forward["all_gather"] == (2 * layers + 1) * half  # and its beginning


# --- checkpoints --------------------------------------------------------------------------------------------------------

SAVED = {"llama": tensor(2, 3), "gpt2": tensor(2, 1, True)}


def _steps(engine: Any, kind: str, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(**batch(kind, step, engine.mesh.sample_group, uneven=False)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _save(rank: int, world: int, folder: str, saved: dict[str, dict[str, Any]]) -> None:
    import zeroengine

    for kind, config in saved.items():
        engine, *_ = zeroengine.initialize(model=build(kind), config=config)
        _steps(engine, kind, 0, 3)
        engine.save_checkpoint(f"{folder}/{kind}", blocking=kind == "llama")
        engine.save_16bit_model(f"{folder}/{kind}-out", "weights.bin")
        engine.save_pretrained(f"{folder}/{kind}-out/model")
        engine.destroy()


def _resume(rank: int, world: int, folder: str, configs: list[dict[str, Any]]) -> list[Any]:
    """The losses of the steps after the checkpoint."""
    import zeroengine

    found = []
    for config in configs:
        for kind in SAVED:
            engine, *_ = zeroengine.initialize(model=build(kind), config=config)
            with torch.no_grad():
                for p in engine.module.parameters():
                    if p.device.type == "cpu" and config["zero_optimization"]["stage"] < 3:
                        p.mul_(0.5)  # what is loaded counts
            engine.load_checkpoint(f"{folder}/{kind}")
            found.append(_steps(engine, kind, 3, STEPS))
            engine.destroy()
    return found


def test_checkpoints_load_at_another_degree(tmp_path: Path) -> None:
    """Saved by two ranks that share layers: whole tensors under full names, and the optimizer goes on at any degree."""
    run_ranks(_save, 2, str(tmp_path), SAVED, timeout=120)
    index = FileSystemReader(next((tmp_path / "llama").glob("global_step*"))).read_metadata().state_dict_metadata
    for name, p in build("llama").named_parameters():
        assert index[f"model.{name}"].size == p.shape == index[f"optim.{name}.exp_avg"].size, name
    for kind in SAVED:  # what is written out is whole, and computes what the checkpoint does
        model = build(kind)
        model.load_state_dict(torch.load(tmp_path / f"{kind}-out" / "weights.bin", weights_only=True))
        read = type(model).from_pretrained(tmp_path / f"{kind}-out" / "model")
        asked = {**batch(kind, 3, uneven=False), "use_cache": False}
        assert abs(float(model(**asked).loss) - reference(kind)[0][3]) <= 1e-5
        assert torch.equal(model(**asked).logits, read(**asked).logits)
    want = {kind: reference(kind)[0][3:] for kind in SAVED}
    got = run_ranks(_resume, 1, str(tmp_path), [settings(1)], timeout=120)[0]
    four = [tensor(4, 1), tensor(4, 3, True)]
    everywhere = run_ranks(_resume, 4, str(tmp_path), four, timeout=240)
    for found in (got, *everywhere):
        for losses, kind in zip(found, (*SAVED, *SAVED), strict=False):
            assert all(abs(a - b) <= 1e-5 * b for a, b in zip(losses, want[kind], strict=True)), (kind, losses, want[kind])


def _different(rank: int, world: int) -> str:
    import zeroengine
    from zeroengine.errors import DivergenceError

    config = tensor(2, 1)
    config["tensor_parallel"]["check_replicas_every"] = 1
    engine, *_ = zeroengine.initialize(model=build("llama"), config=config)
    _steps(engine, "llama", 0, 1)
    with torch.no_grad():
        engine.module.model.norm.weight.mul_(1 + rank)
    with pytest.raises(DivergenceError) as apart:
        _steps(engine, "llama", 1, 2)
    with pytest.raises(DivergenceError, match="must be given the same batch"):
        engine(**batch("llama", rank))
    return str(apart.value)


def test_different_batches_and_values_are_errors() -> None:
    for said in run_ranks(_different, 2, timeout=90):
        assert "hold these parameters whole" in said and "model.norm.weight" in said


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
    error = (mine.grad - whole.grad[:, rank * width : (rank + 1) * width]).abs().max()
    fabric.close()
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
    error = max(float((whole_value(p, p.grad, n) - grads[n]).abs().max()) for n, p in model.named_parameters())
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
