"""Shared experts run while tokens are under way, in forward and in backward; a copy of a converted model is a plain one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.moe import split_models
from tests.moe.common import distance
from tests.moe.hf_models import batch, build, settings
from tests.ranks import run_ranks

pytest.importorskip("transformers")
SHARED = ("shared_expert", "shared_experts", "shared")


class _Watched:
    def __init__(self, work: Any, events: list[str]) -> None:
        self._work, self._events = work, events

    def wait(self) -> None:
        self._work.wait()
        self._events.append("there")


def _order(rank: int, world: int, kinds: list[str]) -> list[dict[str, Any]]:
    import zeroengine

    found = []
    for kind in kinds:
        own = kind == "own"
        model: nn.Module = split_models.build(split_models.Split()) if own else build(kind)
        classes = [type(m) for m in model.modules()]
        stage = 3 if kind in ("own", "qwen2") else 1
        engine, *_ = zeroengine.initialize(model=model, config=settings(2, stage))
        comm, events = engine.experts.group.tokens, []
        plain = comm.all_to_all

        def watched(*args: Any, plain: Any = plain, events: list[str] = events, **kwargs: Any) -> _Watched:
            events.append("sent")
            return _Watched(plain(*args, **kwargs), events)

        comm.all_to_all = watched
        block = [m for n, m in model.named_modules() if n.rpartition(".")[2] in SHARED][-1]  # of the last layer: first in backward

        def ran(_: Any, args: Any, out: Tensor, events: list[str] = events) -> None:
            events.append("shared")
            out.register_hook(lambda grad: events.append("shared back"))

        handle = block.register_forward_hook(ran)
        inputs: Any = {"tokens": split_models.batch(0)} if own else batch(0)
        out = engine(**inputs)
        loss = out if own else out.loss
        forward = list(events)
        events.clear()
        engine.backward(loss)
        engine.step()
        handle.remove()
        del comm.all_to_all
        alone = copy.deepcopy(engine.module) if stage == 1 else None
        engine.destroy()
        same = classes == [type(m) for m in model.modules()]
        again = pickle.loads(pickle.dumps(model))
        found.append({
            "forward": forward, "backward": list(events), "same": same, "pickled": type(again) is type(model),
            "copied": alone is None or not any(type(m).__name__.startswith("Overlapped") for m in alone.modules()),
        })  # fmt: skip
    return found


def test_shared_experts_run_while_tokens_travel() -> None:
    kinds = ["own", "qwen2", "deepseek", "glm4"]
    for got in run_ranks(_order, 2, kinds, timeout=90):
        for kind, found in zip(kinds, got, strict=True):
            forward, backward = found["forward"], found["backward"]
            at = forward.index("shared")
            assert forward[at - 1 : at + 2] == ["sent", "shared", "there"], (kind, forward)
            at = backward.index("shared back")
            before = backward[:at]
            assert before.count("sent") == before.count("there") + 1, (kind, backward)
            assert found["same"] and found["pickled"] and found["copied"], (kind, found)


def test_a_block_of_another_form_keeps_its_own_code() -> None:
    """Equal outputs of a converted block in one process, for forms with a shared expert that are known and one that is not."""
    from zeroengine.moe.hf import convert, revert

    for kind in ("qwen2", "deepseek", "glm4", "ernie"):
        model = build(kind).eval()
        want = model(**batch(0))
        converted = convert(model)
        overlapped = [m for m in model.modules() if type(m).__name__.startswith("Overlapped")]
        assert len(converted) and len(overlapped) == (0 if kind == "ernie" else len(converted)), kind
        got = model(**batch(0))
        assert distance(got.logits.detach(), want.logits.detach()) <= 1e-6, kind
        got.loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        revert(model, converted)
        model(**batch(0)).loss.backward()
        for name, p in model.named_parameters():
            assert (p.grad is None) == (name not in grads), (kind, name)
            assert p.grad is None or distance(grads[name], p.grad) <= 2e-5, (kind, name)


def _six(rank: int, world: int) -> list[str]:
    """Six experts of a transformers model on four ranks and on three."""
    import transformers as hf

    import zeroengine
    from zeroengine.errors import ConfigError

    texts = []
    for ep in (4, 3, 2):
        torch.manual_seed(0)
        model = hf.MixtralForCausalLM(hf.MixtralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            num_local_experts=6, num_experts_per_tok=2,
        ))  # fmt: skip
        names = [n for n, _ in model.named_parameters()]
        try:
            engine, *_ = zeroengine.initialize(model=model, config=settings(ep, 1))
            engine.destroy()
            texts.append("accepted")
        except ConfigError as error:
            texts.append(str(error))
        assert names == [n for n, _ in model.named_parameters()] and type(model.model.layers[0].mlp.experts).__name__ == "MixtralExperts"
    return texts


def _unsplit(rank: int, world: int) -> list[str]:
    """Attentions that the model's own plan leaves whole, on a split sequence."""
    import zeroengine
    from zeroengine.errors import ModelError

    texts = []
    for kind in ("deepseek", "gpt-oss"):
        config = {**settings(1, 1), "mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": True}}
        try:
            zeroengine.initialize(model=build(kind), config=config)
            texts.append("accepted")
        except ModelError as error:
            texts.append(str(error))
    return texts


def test_an_attention_that_no_plan_splits_is_refused_on_a_split_sequence() -> None:
    for texts in run_ranks(_unsplit, 2, timeout=60):
        assert all("does not split the attention 'model.layers.0.self_attn'" in text for text in texts), texts


def test_degrees_that_do_not_fit_the_experts_are_refused_with_the_reason() -> None:
    for texts in run_ranks(_six, 4, timeout=60):
        assert "mesh.ep 4 does not divide the 6 experts of 'model.layers.0.mlp.experts'" in texts[0]
        assert "mesh.ep 3 does not divide the 4 ranks" in texts[1]
        assert texts[2] == "accepted"
