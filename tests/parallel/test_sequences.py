"""What the engine does around sequences that ranks share: batches, loaders, logits, refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.parallel.hf_models import batch, build, sequence, settings
from tests.ranks import run_ranks
from zeroengine.parallel.layout import SequenceLayout
from zeroengine.parallel.loss import IGNORED, next_token_targets

pytest.importorskip("transformers")


def _built_in() -> list[float]:
    """The model says it itself; the configuration has only the degree. Also: what an MLP sees, and the logits."""
    import transformers as hf

    import zeroengine
    from zeroengine.parallel.hf_attention import register

    register()
    torch.manual_seed(7)
    config = hf.LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=8,
                            num_key_value_heads=2, attn_implementation="zero_ring")  # fmt: skip
    model = hf.LlamaForCausalLM(config)
    engine, *_ = zeroengine.initialize(model=model, config=settings(1, mesh={"cp": 2}))
    seen: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda m, a, out: seen.append(out.shape[1]))
    out = engine(**batch("llama", 0))
    layout = engine.sequences.layout(27)
    assert seen == [14] and out.logits.shape[1] == layout.local == 14 and engine.sequences.group.ring.size == 2
    loss = float(out.loss)
    engine.destroy()
    assert model.config._attn_implementation == "sdpa"
    return [loss, float(model(**batch("llama", 0)).loss)]


def _two_at_once() -> None:
    """Two batches before one backward, with blocks that are computed again: the same layout is fine, another is refused."""
    import zeroengine
    from zeroengine.errors import ModelError

    engine, *_ = zeroengine.initialize(model=build("again"), config=sequence("ring", 2, 1))
    kept = [engine(**batch("llama", step)).loss for step in range(2)]
    with pytest.raises(ModelError, match="call backward after each forward"):
        engine(**batch("packed", 2))
    engine.backward(kept[0] + kept[1])
    engine(**batch("packed", 2))
    engine.destroy()


def _different(rank: int) -> str:
    import zeroengine
    from zeroengine.errors import DivergenceError

    engine, *_ = zeroengine.initialize(model=build("llama"), config=sequence("ring", 2, 1))
    with pytest.raises(DivergenceError) as said:
        engine(**batch("llama", rank))
    return str(said.value)


def _behaviour(rank: int, world: int) -> tuple[list[float], str]:
    chosen = _built_in()
    _two_at_once()
    return chosen, _different(rank)


def test_models_choose_and_batches_are_watched() -> None:
    for (loss, alone), said in run_ranks(_behaviour, 2, timeout=120):
        assert abs(loss - alone) <= 1e-6 * alone
        assert "must be given the same batch" in said and "ranks [1] differ from rank 0" in said


def test_no_target_is_lost_at_a_border() -> None:
    """O01: tokens 1..8 have 7 targets, however they are cut."""
    targets = next_token_targets(torch.arange(1, 9)[None])
    for ranks in (1, 2, 4):
        layout = SequenceLayout(8, 1, ranks)
        parts = [layout.shard(targets, r, fill=IGNORED) for r in range(ranks)]
        assert sum(int((p != IGNORED).sum()) for p in parts) == 7
        assert torch.equal(layout.unshard(parts), targets)


def _loader(rank: int, world: int) -> tuple[list[int], int]:
    import zeroengine

    data = [{"input_ids": torch.full((8,), i), "labels": torch.full((8,), i)} for i in range(16)]
    engine, _, loader, _ = zeroengine.initialize(model=build("llama"), config=sequence("ring", 2, 1), training_data=data)
    ids = [int(i) for made in loader for i in made["input_ids"][:, 0]]
    return ids, engine.batch.train


def test_loader_gives_a_sequence_group_the_same_samples() -> None:
    got = run_ranks(_loader, 4, timeout=120)
    assert got[0] == got[1] and got[2] == got[3] and got[0][1] == 4
    assert sorted(got[0][0] + got[2][0]) == list(range(16))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mesh": {"cp": 3}}, r"cp 3 = 3 does not divide 2 ranks \(2 / 3 = 0.67"),
    ({"mesh": {"cp": 2}, "sequence_parallel": {"attention": "usp", "ulysses": 3}}, r"3 does not divide the 2 ranks"),
    ({"mesh": {"cp": 2}, "sequence_parallel": {"attention": "usp"}}, r"go together"),
    ({"mesh": {"tp": 2, "cp": 2}}, r"cp 2 x tp 2 = 4 does not divide 2 ranks"),
    ({"mesh": {"tp": 2}, "optimizer": {"type": "Muon", "params": {"lr": 0.1}}}, r"looks at whole parameters, and mesh.tp"),
    ({"mesh": {"tp": 2}, "tensor_parallel": {"loss_parallel": True}, "kind": "bert"}, r"loss_parallel: .* splits no layers"),
]


def _refused(rank: int, world: int) -> list[str]:
    """What is said about each, and that the model can be given again afterwards."""
    import zeroengine
    from zeroengine.errors import ConfigError, ModelError

    said = []
    for changes, _ in REFUSED:
        changes = dict(changes)
        model = build(changes.pop("kind", "llama"))
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        with pytest.raises(ConfigError) as refused:
            zeroengine.initialize(model=model, config=settings(1, **changes))
        said.append(str(refused.value))
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        assert not any("Parallel" in type(m).__name__ or type(m).__name__.startswith("Column") for m in model.modules())
    with pytest.raises(ModelError) as other:
        zeroengine.initialize(model=torch.nn.Linear(4, 4), config=settings(1, mesh={"cp": 2}))
    said.append(str(other.value))
    with pytest.raises(ModelError) as silent:  # O10: it takes the name and computes attention by itself
        engine, *_ = zeroengine.initialize(model=_Deaf(), config=sequence("ring", 2, 1))
        engine(**batch("llama", 0))
    said.append(str(silent.value))
    return said


class _Deaf(torch.nn.Module):
    """Says yes to every attention function and calls none."""

    def __init__(self) -> None:
        super().__init__()
        inner = build("llama")
        self.config, self.embed, self.head = inner.config, inner.model.embed_tokens, inner.lm_head

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return {"logits": self.head(self.embed(input_ids))}


def test_what_cannot_be_right_is_refused() -> None:
    for said in run_ranks(_refused, 2, timeout=120):
        for text, (changes, expected) in zip(said, REFUSED, strict=False):
            assert re.search(expected, text), (changes, text)
        assert "no transformers model" in said[-2] and "did not call the attention" in said[-1]
