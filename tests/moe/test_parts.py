"""Parts of the layer in one process: choice, capacity, losses, plans, the wire."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroengine.errors import ConfigError
from zeroengine.moe import Capacity, ExpertBank, ExpertList, MoE, Router, RouterRule
from zeroengine.moe.collectives import decode, encode
from zeroengine.moe.group import alone
from zeroengine.moe.grouped import grouped_linear, grouped_mlp
from zeroengine.moe.plan import block_order, even_shares, invert
from zeroengine.moe.statistics import Statistics


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_layer_is_the_weighted_sum_of_its_experts(k: int, score: str) -> None:
    torch.manual_seed(0)
    bank = ExpertBank(4, 8, 12)
    layer = MoE(8, bank, rule=RouterRule(k=k, score=score, normalize=True, scale=2.5))  # type: ignore[arg-type]
    x = torch.randn(3, 5, 8, requires_grad=True)
    out, _, load = layer(x)
    flat = x.detach().reshape(-1, 8).requires_grad_()
    logits = flat @ layer.sparse.router.weight.T
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    weights, index = scores.topk(k, -1)
    weights = 2.5 * weights / weights.sum(-1, keepdim=True)
    inner = torch.einsum("th,erh->ter", flat, bank.gate_up_proj)
    each = torch.einsum("ter,ehr->teh", nn.functional.silu(inner[..., :12]) * inner[..., 12:], bank.down_proj)
    want = (each.gather(1, index[..., None].expand(-1, -1, 8)) * weights[..., None]).sum(1)
    assert torch.allclose(out.view(-1, 8), want, atol=1e-6)
    assert load.tolist() == torch.bincount(index.view(-1), minlength=4).tolist()
    g = torch.randn_like(want)
    params = [bank.gate_up_proj, bank.down_proj, layer.sparse.router.weight]
    got = torch.autograd.grad((out.view(-1, 8) * g).sum(), [x, *params])
    for a, b in zip(got, torch.autograd.grad((want * g).sum(), [flat, *params]), strict=True):
        assert torch.allclose(a.view_as(b), b, atol=2e-6)


def test_groups_limit_the_choice_as_deepseek_does() -> None:
    hf = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = pytest.importorskip("transformers").DeepseekV3Config(
        hidden_size=8, n_routed_experts=16, num_experts_per_tok=3, n_group=4, topk_group=2, routed_scaling_factor=2.0
    )
    torch.manual_seed(0)
    theirs = hf.DeepseekV3TopkRouter(config)
    rule = RouterRule(k=3, score="sigmoid", normalize=True, scale=2.0, groups=4, top_groups=2, bias_speed=0.1)
    ours = Router(8, 16, rule)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight)
        theirs.e_score_correction_bias.copy_(torch.randn(16) * 0.3)
        ours.bias.copy_(theirs.e_score_correction_bias)  # type: ignore[union-attr]
    x = torch.randn(40, 8)
    _, weights, index = theirs(x)
    routing = ours(x)
    for row in range(40):
        want = dict(zip(index[row].tolist(), weights[row].tolist(), strict=True))
        got = dict(zip(routing.index[row].tolist(), routing.weights[row].tolist(), strict=True))
        assert got.keys() == want.keys() and all(abs(got[e] - want[e]) < 1e-6 for e in got)


def test_the_bias_evens_the_load_without_a_loss() -> None:
    torch.manual_seed(0)
    router = Router(8, 8, RouterRule(k=2, score="sigmoid", bias_speed=0.02, aux_weight=0.0))
    with torch.no_grad():
        router.weight[0] += 0.5
    x = torch.randn(512, 8) + 0.5

    def imbalance() -> float:
        load = torch.bincount(router(x).index.view(-1), minlength=8)
        router.move_bias(load)
        return float(load.max() / load.float().mean())

    before = imbalance()
    for _ in range(100):
        after = imbalance()
    assert before > 2 and after < 1.2


@pytest.mark.parametrize("priority", ["position", "score", "random"])
def test_capacity(priority: str) -> None:
    torch.manual_seed(0)
    rule = RouterRule(k=2, capacity=Capacity(0.5, 0.75, 1, priority))  # type: ignore[arg-type]
    router = Router(8, 4, rule)
    x = torch.randn(20, 8)
    for training, factor in ((True, 0.5), (False, 0.75)):
        router.train(training)
        routing = router(x)
        limit = int(-(-factor * 2 * 20 // 4))
        for e in range(4):
            chosen = routing.index == e
            kept = chosen & routing.keep
            assert int(kept.sum()) == min(limit, int(chosen.sum()))
            if priority == "score" and int(chosen.sum()) > limit:
                assert routing.weights[kept].min() >= routing.weights[chosen & ~routing.keep].max()
            if priority == "position" and int(chosen.sum()) > limit:
                order = [(j, t) for j in range(2) for t in range(20) if chosen[t, j]]
                assert {(j, t) for j, t in order[:limit]} == {(j, t) for t, j in kept.nonzero().tolist()}
    layer = MoE(8, ExpertBank(4, 8, 12), rule=rule)
    out, _, load = layer(x)
    assert out.shape == x.shape and int(load.max()) <= 5


def test_minimum_capacity_and_wrong_rules() -> None:
    assert Capacity(1.0, 1.0, 4).of(3, 1, 8, True) == 4
    for rule in (RouterRule(k=5), RouterRule(k=2, groups=3), RouterRule(k=3, groups=2, top_groups=1)):
        with pytest.raises(ConfigError):
            Router(8, 4, rule)


def test_losses_are_one_for_an_even_load_and_z_counts() -> None:
    router = Router(8, 4, RouterRule(k=4, z_weight=0.5))
    with torch.no_grad():
        router.weight.zero_()
    loss = float(router(torch.randn(6, 8)).loss)
    assert abs(loss - 1 - 0.5 * torch.tensor(4.0).log().item() ** 2) < 1e-5
    router.eval()
    assert float(router(torch.randn(6, 8)).loss) == 0.0


def test_noise_is_only_in_training() -> None:
    for noise in ("jitter", "gumbel"):
        router = Router(8, 16, RouterRule(k=1, noise=noise, jitter=0.5))  # type: ignore[arg-type]
        x = torch.randn(200, 8)
        assert not torch.equal(router(x).index, router(x).index)
        router.eval()
        assert torch.equal(router(x).index, router(x).index)


def test_plans_make_all_ranks_equal_with_few_copies() -> None:
    rng = random.Random(0)
    for _ in range(300):
        ranks = rng.choice([1, 2, 3, 4, 8])
        local = rng.choice([1, 2, 4])
        loads = [rng.choice([0, 0, 1, 5, 100, 1000, rng.randrange(5000)]) for _ in range(ranks * local)]
        shares = even_shares(loads, ranks)
        computed = [sum(s.number for s in shares if s.host == r) for r in range(ranks)]
        assert max(computed) - min(computed) <= 1
        for e, load in enumerate(loads):
            assert sum(s.number for s in shares if s.expert == e) == load
        for r in range(ranks):
            assert len({s.expert for s in shares if s.host == r and s.expert // local != r}) <= local


def test_orders_of_blocks() -> None:
    sizes, order = torch.tensor([2, 0, 3, 1]), torch.tensor([3, 2, 1, 0])
    got = block_order(sizes, order)
    assert got.tolist() == [5, 2, 3, 4, 0, 1]
    assert got[invert(got)].tolist() == list(range(6))


def test_the_wire() -> None:
    rows = torch.randn(5, 16) * torch.tensor([1e-3, 1.0, 0.0, 50.0, 1e4])[:, None]
    assert torch.equal(decode(encode(rows, "same"), "same", rows.dtype), rows)
    assert encode(rows, "fp8").shape == (5, 20) and encode(rows, "fp8").dtype is torch.uint8
    for wire, worst in (("bf16", 2**-8), ("fp8", 2**-4)):
        back = decode(encode(rows, wire), wire, rows.dtype)  # type: ignore[arg-type]
        scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-12)
        assert float(((back - rows) / scale).abs().max()) <= worst


def test_grouped_matrices_equal_a_loop() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(9, 4, requires_grad=True), torch.randn(3, 6, 4, requires_grad=True)
    out = grouped_linear(x, w, [4, 0, 5])
    want = torch.cat([x[:4] @ w[0].T, x[4:] @ w[2].T])
    assert torch.allclose(out, want)
    g = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad((out * g).sum(), (x, w)), torch.autograd.grad((want * g).sum(), (x, w)), strict=True):
        assert torch.allclose(a, b)


@pytest.mark.parametrize("wanted", ["all", "no weights", "no rows", "second bias only"])
@pytest.mark.parametrize("adds", [True, False])
def test_two_layers_keep_only_what_backward_needs(wanted: str, adds: bool) -> None:
    torch.manual_seed(0)
    counts = [4, 0, 5]
    shapes = {"x": (9, 4), "first": (3, 12, 4), "second": (3, 5, 6), "first_bias": (3, 12), "second_bias": (3, 5)}
    given = {n: torch.randn(s) for n, s in shapes.items()}
    trained = {
        "all": list(shapes), "no weights": ["x", "first_bias"], "no rows": ["first", "second", "first_bias", "second_bias"],
        "second bias only": ["second_bias"],
    }[wanted]  # fmt: skip
    for name in trained:
        given[name].requires_grad_()

    def act(z: torch.Tensor) -> torch.Tensor:
        gate, up = z.chunk(2, -1)
        return nn.functional.silu(gate) * up

    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        out = grouped_mlp(given["x"], given["first"], given["second"], counts, act, given["first_bias"], given["second_bias"], adds)
    assert sorted(kept) == sorted(torch.Size(s) for s in (shapes["x"], (9, 12), shapes["first"], shapes["second"]))
    rows = {e: given["x"].split(counts)[e] for e in (0, 2)}
    inner = {e: act(x @ given["first"][e].T + given["first_bias"][e]) @ given["second"][e].T for e, x in rows.items()}
    want = torch.cat([y + given["second_bias"][e] for e, y in inner.items()])
    shown = want if adds else torch.cat(list(inner.values()))
    assert torch.allclose(out, shown, atol=1e-6)
    g = torch.randn_like(out)
    leaves = [given[n] for n in trained]
    for name, a, b in zip(trained, *(torch.autograd.grad((y * g).sum(), leaves) for y in (out, want)), strict=True):
        assert torch.allclose(a, b, atol=1e-5), name


def test_lists_need_equal_experts_and_a_layer_knows_deepspeeds_arguments() -> None:
    with pytest.raises(ConfigError, match="same names and shapes"):
        ExpertList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
    with pytest.raises(ConfigError, match="noisy_gate_policy"):
        MoE(4, nn.Linear(4, 4), noisy_gate_policy="Loud")
    layer = MoE(4, nn.Linear(4, 4), num_experts=4, k=2, capacity_factor=0.5, min_capacity=1, use_residual=True, noisy_gate_policy="Jitter")
    out, loss, load = layer(torch.randn(2, 7, 4))
    out.sum().backward()
    assert out.shape == (2, 7, 4) and loss.shape == () and load.shape == (4,)
    assert all(p.grad is not None for p in layer.parameters())
    assert alone().size == 1


def test_a_shared_expert_is_added() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    layer = MoE(4, ExpertBank(2, 4, 8, "gelu", gated=False, bias=True), drop_tokens=False, shared=shared)
    x = torch.randn(5, 4)
    with_shared = layer(x)[0]
    layer.sparse.shared = None
    assert torch.allclose(with_shared, layer(x)[0] + shared(x), atol=1e-6)


def test_statistics_read_no_value_until_they_are_asked_for() -> None:
    with FakeTensorMode():  # whose tensors have none
        unread = Statistics(4)
        for _ in range(2):
            unread.record(torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2, dtype=torch.bool), torch.ones(3, 4), True)
    counted = Statistics(4)
    assert counted.row().tolist() == [0.0] * 7
    for _ in range(2):
        counted.record(torch.tensor([[0, 1], [0, 3]]), torch.tensor([[True, False], [True, True]]), torch.ones(2, 4), True)
    counted.record(torch.tensor([[2, 2]]), None, None, False)
    assert counted.load.tolist() == [4, 2, 0, 2] and counted.row().tolist() == pytest.approx([4, 2, 0, 2, 2, 4 * math.log(4), 4])
