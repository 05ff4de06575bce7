"""Operations by module against closed forms, with attention and recomputation; how a profile is shown."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zeroengine.monitor.flops import Counter, Stopwatch
from zeroengine.monitor.flops_text import ModuleFigures, Profile, show

BATCH, LENGTH, WIDTH, HEADS = 2, 8, 16, 2
TOKENS = BATCH * LENGTH


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (BATCH, LENGTH, HEADS, WIDTH // HEADS)
        q, k, v = (t.reshape(heads).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class Net(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.recompute = recompute

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x.square().mean()


LINEAR = 2 * TOKENS * 4 * WIDTH * WIDTH  # of one layer: three widths in, one out
ATTENTION = 2 * 2 * BATCH * HEADS * LENGTH * LENGTH * (WIDTH // HEADS)  # two products


def count(recompute: bool) -> Counter:
    model = Net(recompute)
    counter = Counter(model)
    try:
        loss = model(torch.randint(0, 5, (BATCH, LENGTH)))
        counter.begin_backward()
        loss.backward()
        counter.end_backward()
    finally:
        counter.close()
    return counter


def test_attention_and_linear_layers() -> None:
    counter = count(recompute=False)
    assert counter.forward[""] == 2 * (LINEAR + ATTENTION)
    assert counter.forward["layers.0"] == counter.forward["layers.1"] == LINEAR + ATTENTION
    assert counter.forward["layers.0.out"] == 2 * TOKENS * WIDTH * WIDTH
    # of attention, backward computes the scores again: five products for two
    assert counter.backward[""] == 2 * (2 * LINEAR + ATTENTION * 5 // 2)
    assert counter.backward["layers.1"] == 2 * LINEAR + ATTENTION * 5 // 2


def test_recomputation_is_backward() -> None:
    counter = count(recompute=True)
    assert counter.forward[""] == 2 * (LINEAR + ATTENTION)
    last = 2 * TOKENS * WIDTH * WIDTH  # nothing reads the output of a layer's last product: it is not computed again
    assert counter.backward[""] == 2 * (2 * LINEAR + ATTENTION * 5 // 2) + 2 * (LINEAR + ATTENTION - last)


def test_times_are_of_forward_only_and_the_hooks_go() -> None:
    model = Net(recompute=True)
    watch = Stopwatch(model)
    model(torch.randint(0, 5, (BATCH, LENGTH))).backward()
    once = dict(watch.seconds)
    watch.close()
    assert set(once) == {name for name, _ in model.named_modules()} - {"layers"} and all(s > 0 for s in once.values())
    assert once[""] >= once["layers.0"] >= once["layers.0.qkv"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def profile(backward: int) -> Profile:
    modules = [
        ModuleFigures("", "Net", 100, 1000, backward, 0.5), ModuleFigures("a", "Layer", 60, 700, 1400, 0.3),
        ModuleFigures("b", "Layer", 30, 200, 400, 0.1), ModuleFigures("b.c", "Linear", 20, 100, 200, 0.05),
        ModuleFigures("d", "Embedding", 10, 100, 200, 0.1),
    ]  # fmt: skip
    return Profile(3, modules, {"forward": 0.5, "backward": 1.0, "step": 0.25}, 2.0, 3000.0, True)


@pytest.mark.parametrize(("backward", "mfu", "hfu"), [(2000, 0.5, 0.5), (3000, 0.5, 4000 / 6000), (1500, 2500 / 6000, 2500 / 6000)])
def test_utilisation_leaves_recomputation_out(backward: int, mfu: float, hfu: float) -> None:
    assert profile(backward).mfu == pytest.approx(mfu) and profile(backward).hfu == pytest.approx(hfu)


def test_depth_and_number_of_kinds_are_those_asked_for() -> None:
    text = show(profile(2000), depth=1, top=1, detailed=False)
    assert "Layer (2)" in text and "Embedding" not in text and "Linear" not in text and "50.0 %" in text
    assert "Embedding (1)" in show(profile(2000), depth=1, top=2, detailed=False)
    assert "Linear (1)" in show(profile(2000), depth=-1, top=1, detailed=False)
    tree = show(profile(2000), depth=0, top=1, detailed=True).split("backward FLOPs")[-1]
    assert "    c " in tree and "20.0 %" in tree and "70.0 %" in tree
