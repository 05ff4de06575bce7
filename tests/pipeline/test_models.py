"""What can be put into a pipeline: ties, Hugging Face models, checkpoints of another split, dropout, recomputation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeroengine
from tests.pipeline import common
from tests.ranks import run_ranks
from zeroengine.errors import ConfigError, ModelError
from zeroengine.pipeline.layers import LayerSpec, TiedLayerSpec
from zeroengine.pipeline.module import PipelineModule
from zeroengine.pipeline.partition import balanced, layer_weights


class Pair(nn.Module):
    """A norm and a nested linear layer, to be tied by three names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.norm(x)))


ATTRIBUTES = ["norm.weight", "norm.bias", "inner.0.weight"]


def _tied_layers() -> list[Any]:
    def a() -> TiedLayerSpec:
        return TiedLayerSpec("a", nn.Linear, 4, 4, tied_weight_attr=["weight", "bias"])

    def b() -> TiedLayerSpec:
        return TiedLayerSpec("b", Pair, tied_weight_attr=ATTRIBUTES)

    return [b(), a(), LayerSpec(Pair), b(), a(), b()]


def _tied(rank: int, world: int, stage: int, stages: int) -> Any:
    zeroengine.init_distributed(verbose=False)
    model = PipelineModule(_tied_layers(), stages, F.mse_loss, partition_method="uniform")
    engine, *_ = zeroengine.initialize(model=model, config=common.config(stage, 3))
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(4):
        pairs = [(torch.randn(5, 4, generator=generator), torch.randn(5, 4, generator=generator)) for _ in range(3)]
        losses.append(float(engine.train_batch(iter(pairs))))
    return losses, engine.get_global_grad_norm(), engine.full_state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_two_ties_of_several_names_over_three_stages(stage: int) -> None:
    split = run_ranks(_tied, 3, stage, 3, timeout=100)
    whole = run_ranks(_tied, 1, stage, 1, timeout=60)[0]
    assert split[0][0] == split[2][0] == pytest.approx(whole[0], rel=1e-5)
    assert split[0][1] == pytest.approx(whole[1], rel=1e-5)
    weights, expected = split[0][2], whole[2]
    assert set(weights) == set(expected)
    assert all(torch.allclose(weights[n], v, atol=1e-5) for n, v in expected.items())
    for name in ATTRIBUTES:
        copies = [weights[f"layers.{i}.{name}"] for i in (0, 3, 5)]
        assert torch.equal(copies[0], copies[1]) and torch.equal(copies[0], copies[2])


def _llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=1,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _texts(step: int, micro: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    found = []
    for i in range(micro):
        ids = torch.randint(1, 32, (2, 5 + i), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, -2:] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def _train_llama(rank: int, world: int, stage: int, chunks: int) -> Any:
    from zeroengine.pipe import split_causal_lm

    zeroengine.init_distributed(verbose=False)
    with zeroengine.zero.Init(enabled=stage == 3):
        whole = _llama()
    still = whole.model.layers[0].mlp.eval()
    model = split_causal_lm(whole, world, schedule="interleaved" if chunks > 1 else "1f1b", virtual_stages=chunks)
    assert whole.training and not still.training
    engine, *_ = zeroengine.initialize(model=model, config=common.config(stage, 2))
    losses = [float(engine.train_batch(iter(_texts(step, 2)))) for step in range(2)]
    still = next(m for m in model.modules() if isinstance(m, type(still))).eval()
    mean = float(engine.eval_batch(iter(_texts(9, 2)), 2))
    assert model.training and model.skeleton(model.local_stages[0]).training and not still.training
    return losses, engine.full_state_dict(), mean


@pytest.mark.parametrize(("stage", "chunks"), [(1, 1), (3, 2)])
def test_a_hugging_face_model(stage: int, chunks: int) -> None:
    results = run_ranks(_train_llama, 2, stage, chunks, timeout=150)
    model = _llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss_of(texts: list[dict[str, Tensor]]) -> Tensor:
        counts = [int((t["labels"][:, 1:] != -100).sum()) for t in texts]
        return sum((model(**t).loss * n for t, n in zip(texts, counts, strict=True)), torch.zeros(())) / sum(counts)

    losses = []
    for step in range(2):
        loss = loss_of(_texts(step, 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert results[0][0] == results[1][0] == pytest.approx(losses, rel=1e-5)
    assert results[0][2] == pytest.approx(float(loss_of(_texts(9, 2)).detach()), rel=1e-5)
    expected = model.state_dict()
    assert set(results[0][1]) == set(expected)
    for name, value in expected.items():
        assert torch.allclose(results[0][1][name], value, atol=1e-5), name


def _resume(rank: int, world: int, folder: str, save: bool, options: dict[str, Any]) -> Any:
    zeroengine.init_distributed(verbose=False)
    engine, *_ = zeroengine.initialize(model=common.module(world, **options), config=common.config(2, 4))
    if save:
        engine.train_batch(common.batches(0, 4, 0))
        engine.save_checkpoint(folder)
    else:
        assert engine.load_checkpoint(folder)[0] is not None
    losses = [float(engine.train_batch(common.batches(step, 4, 0))) for step in (1, 2)]
    return losses, engine.full_state_dict()


def test_a_checkpoint_loads_at_another_split(tmp_path: Path) -> None:
    saved = run_ranks(_resume, 2, str(tmp_path), True, {}, timeout=100)[0]
    for world, options in ((1, {}), (2, {"schedule": "zb-v"}), (3, {"schedule": "zb-h1"})):
        loaded = run_ranks(_resume, world, str(tmp_path), False, options, timeout=100)[0]
        assert loaded[0] == pytest.approx(saved[0], rel=1e-6)
        assert all(torch.allclose(loaded[1][n], v, atol=2e-6) for n, v in saved[1].items())


def _options(rank: int, world: int, options: dict[str, Any], more: dict[str, Any]) -> Any:
    zeroengine.init_distributed(verbose=False)
    engine, *_ = zeroengine.initialize(model=common.module(world, **options), config=common.config(1, 4, **more))
    losses, evals = [], []
    for step in range(2):
        losses.append(float(engine.train_batch(common.batches(step, 4, 0))))
        evals += [float(engine.eval_batch(common.batches(7, 3, 0), 3)) for _ in range(2)]
    outputs = engine.eval_batch(common.batches(7, 2, 0), 2, return_outputs=True)
    shapes = None if outputs is None else [tuple(o.shape) for o in outputs]
    ended = None
    try:
        engine.train_batch(common.batches(0, 3, 0))
    except StopIteration as error:
        ended = str(error)
    timeline = engine.timeline()
    with pytest.raises(ConfigError, match="train_batch"):
        engine(1)
    return losses, evals, shapes, ended, len(timeline.spans), engine.skipped_steps, engine.loss_scale


def test_dropout_recomputation_and_evaluation() -> None:
    options = {"dropout": 0.3, "dropout_seed": 5, "activation_checkpoint_interval": 2}
    whole = run_ranks(_options, 1, {"dropout": 0.3, "dropout_seed": 5}, {}, timeout=60)[0]
    first, last = run_ranks(_options, 2, {**options, "schedule": "zb-h1"}, {}, timeout=100)
    for result in (first, last):
        assert result[0] == pytest.approx(whole[0], rel=1e-6) and result[1] == pytest.approx(whole[1], rel=1e-6)
        assert "ended before 4" in result[3] and result[4] == 2 * 2
    assert whole[1][0] == whole[1][1] and whole[0][0] != pytest.approx(common.single(4, 1)[0][0], rel=1e-6)
    assert first[2] is None and last[2] == [(2, 3, common.VOCABULARY)] * 2


def test_one_decision_to_skip_over_all_stages() -> None:
    """fp16 with a loss scale that overflows the first step: every stage skips it and lowers the scale."""
    results = run_ranks(_options, 2, {}, {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}, timeout=100)
    assert results[0][5] == results[1][5] > 0 and results[0][6] == results[1][6] < 2.0**24


def test_partition() -> None:
    assert balanced([1.0] * 7, 3) == [0, 2, 4, 7] or max(b - a for a, b in zip([0, 2, 4], [2, 4, 7], strict=True)) == 3
    assert balanced([5, 1, 1, 1, 1, 1], 2) == [0, 1, 6]
    assert balanced([0, 1, 1, 0, 1, 1, 0], 2)[1] in (3, 4)
    names = ["Embedding", "Block", "Block", "Norm"]
    assert layer_weights("type:block", names, lambda: []) == [0, 1, 1, 0]
    assert layer_weights([1, 2, 3, 4], names, lambda: []) == [1, 2, 3, 4]
    for method in ("type:none", "even", [1.0]):
        with pytest.raises(ModelError, match="matches none|is not uniform|times for 4 layers"):
            layer_weights(method, names, lambda: [])
    with pytest.raises(ModelError, match="2 layers can not be cut into 3"):
        balanced([1, 1], 3)


def test_the_split_does_not_change_the_model() -> None:
    """Names and initial values follow from a layer's index; on one rank the module is a plain model."""
    plain = common.module()
    virtual = common.module(1, schedule="interleaved", virtual_stages=3)
    assert {n for n, _ in plain.named_parameters()} == {n for n, _ in virtual.named_parameters()}
    x, _ = common.batch(0, 0, 0)
    assert torch.equal(plain(x), virtual(x)) and plain.layers["0"].weight is plain.layers["9"].module.weight


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: PipelineModule([TiedLayerSpec("k", nn.Linear, n, n) for n in (2, 3)]), "is tied to one of shape"),
        (lambda: PipelineModule([TiedLayerSpec("k", nn.ReLU)]), "has no parameter 'weight' to tie"),
        (lambda: PipelineModule([nn.Linear(2, 2), 3]), "neither a module nor a function"),
        (lambda: PipelineModule([nn.Linear(2, 2)], 2), "init_distributed"),
        (lambda: PipelineModule([nn.Linear(2, 2)], schedule="1b1f"), "did you mean `1f1b`"),
    ],
)
def test_what_is_refused(make: Any, reason: str) -> None:
    with pytest.raises(ConfigError if "1f1b" in reason else ModelError, match=reason):
        make()


def test_a_model_that_can_not_be_cut_is_refused() -> None:
    """One of whose blocks looks at the embeddings once more, which only the first stage has."""
    from zeroengine.pipe import split_causal_lm

    model, kept = _llama(), []
    model.model.register_forward_pre_hook(lambda m, args: kept.clear())
    model.model.embed_tokens.register_forward_hook(lambda m, args, output: kept.append(output))
    model.model.layers[3].register_forward_pre_hook(lambda m, args: (args[0] + kept[0], *args[1:]) if kept else None)
    with pytest.raises(ModelError, match="can not be cut.*give another result"):
        split_causal_lm(model, 1, schedule="interleaved", virtual_stages=2)
    model.model.layers[3].register_forward_pre_hook(lambda m, args: [][0] if not kept else None)
    with pytest.raises(ModelError, match=r"can not be cut.*a part of it fails by itself \(IndexError"):
        split_causal_lm(model, 1, schedule="interleaved", virtual_stages=2)


FAMILIES: dict[str, dict[str, Any]] = {  # what they compute beside their blocks
    "Gemma2": {"head_dim": 8, "sliding_window": 3},  # scales embeddings, caps logits
    "Granite": {"embedding_multiplier": 2.0, "logits_scaling": 3.0},
    "Cohere": {"logit_scale": 0.25},
    "OPT": {"ffn_dim": 24, "word_embed_proj_dim": 8, "max_position_embeddings": 32},  # projects on both ends
    "Bloom": {},  # a norm of the embeddings
    "Mamba": {"state_size": 4},  # asks the head for its type
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_models_do_beside_their_blocks(family: str) -> None:
    """Stages compute what the whole model does, or `split_causal_lm` raises; nothing but tied embeddings is on two of them."""
    transformers = pytest.importorskip("transformers")
    from zeroengine.pipe import split_causal_lm

    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "pad_token_id": 0}
    if family not in ("OPT", "Bloom", "Mamba"):
        sizes |= {"intermediate_size": 24, "num_key_value_heads": 1}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, **FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    module = split_causal_lm(model, 1, schedule="interleaved", virtual_stages=4)
    assert [t.stages for t in module.ties] == ([(0, 3)] if model.config.tie_word_embeddings else [])
    module.eval(), model.eval()
    given = {"input_ids": torch.randint(1, 32, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.int64)}
    assert torch.allclose(module(given), model(**given).logits, atol=1e-5)


@pytest.mark.parametrize("name", ["gradient_checkpointing_enable", "activation_checkpointing_enable"])
def test_a_stage_knows_that_its_blocks_run_again(name: str) -> None:
    from zeroengine.pipe import split_causal_lm

    model = _llama()
    module = split_causal_lm(model, 1, schedule="interleaved", virtual_stages=2)
    if not hasattr(model, name):
        pytest.skip("a name of newer releases of transformers")
    assert not module.recomputes
    getattr(module, name)()
    assert module.recomputes


def _idle_stage(rank: int, world: int, cases: list[tuple[int, str]]) -> Any:
    """The first stage has parameters that are frozen, or none at all."""
    zeroengine.init_distributed(verbose=False)
    found = []
    for stage, first in cases:
        ends = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Tanh)] if first == "frozen" else [LayerSpec(nn.Tanh), LayerSpec(nn.Identity)]
        model = PipelineModule(
            [*ends, LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4)], world, F.mse_loss, partition_method="uniform"
        )
        for name, p in model.named_parameters():
            p.requires_grad_(not (first == "frozen" and name.startswith("layers.0.")))
        engine, *_ = zeroengine.initialize(model=model, config=common.config(stage, 2, gradient_clipping=0.01))
        generator = torch.Generator().manual_seed(3)
        losses, norms = [], []
        for _ in range(2):
            pairs = [(torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)) for _ in range(2)]
            losses.append(float(engine.train_batch(iter(pairs))))
            norms.append(engine.get_global_grad_norm())
        found.append((losses, norms))
        engine.destroy()
    return found


def test_a_stage_without_anything_to_train() -> None:
    cases = [(stage, first) for stage in (0, 1, 3) for first in ("frozen", "none")]
    one = run_ranks(_idle_stage, 1, cases, timeout=60)[0]
    for results in run_ranks(_idle_stage, 2, cases, timeout=100):
        for case, (losses, norms), (want, wanted) in zip(cases, results, one, strict=True):
            assert losses == pytest.approx(want, rel=1e-6) and norms == pytest.approx(wanted, rel=1e-6), case
