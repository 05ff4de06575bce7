"""Real architectures over shared sequences follow one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.hf_models import batch, build, follows, reference, settings, train
from tests.ranks import run_ranks

pytest.importorskip("transformers")


def sequence(attention: str, cp: int, stage: int, **more: Any) -> dict[str, Any]:
    return settings(stage, mesh={"cp": cp}, sequence_parallel={"attention": attention, **more})


def check(world: int, runs: list[tuple[str, dict[str, Any]]], groups: int = 1) -> None:
    got = run_ranks(train, world, runs, timeout=200)
    for i, (kind, config) in enumerate(runs):
        want = reference(kind, groups)
        for rank in range(world):
            assert follows(got[rank][i], want), (kind, config, rank, got[rank][i], want)


def test_two_ranks_share_a_sequence() -> None:
    check(2, [
        ("llama", sequence("ulysses", 2, 1)), ("llama", sequence("ring", 2, 3)), ("qwen", sequence("ring", 2, 1)),
        ("qwen", sequence("ulysses", 2, 3)), ("gpt2", sequence("ulysses", 2, 1)), ("gpt2", sequence("ring", 2, 3)),
        ("packed", sequence("ring", 2, 1)), ("packed", sequence("ulysses", 2, 0)),
    ])  # fmt: skip


def test_windows_padding_and_both_directions() -> None:
    check(2, [
        ("gemma", sequence("ulysses", 2, 1)), ("gemma", sequence("ring", 2, 3)), ("bert", sequence("ulysses", 2, 3)),
        ("bert", sequence("ring", 2, 1, layout="contiguous")), ("mistral", sequence("ring", 2, 2)),
        ("opt", sequence("ring", 2, 1)),
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("run", "groups"),
    [
        (("qwen", sequence("usp", 4, 3, ulysses=2)), 1),
        (("llama", sequence("usp", 4, 1, ulysses=2)), 1),
        (("llama", sequence("ring", 2, 3)), 2),
        (("gpt2", sequence("ulysses", 2, 1)), 2),
    ],
)
def test_four_ranks_ulysses_times_ring_and_data_parallel(run: tuple[str, dict[str, Any]], groups: int) -> None:
    check(4, [run], groups)


def _built_in(rank: int, world: int) -> list[float]:
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


def test_the_model_can_choose() -> None:
    for rank_loss, alone in run_ranks(_built_in, 2, timeout=90):
        assert abs(rank_loss - alone) <= 1e-6 * alone


def _labels(rank: int, world: int) -> int:
    from zeroengine.parallel.layout import SequenceLayout
    from zeroengine.parallel.loss import next_token_targets

    layout = SequenceLayout(8, 1, 2)
    return int((layout.shard(next_token_targets(torch.arange(1, 9)[None]), rank, fill=-100) != -100).sum())


def test_no_target_is_lost_at_a_border() -> None:
    assert _labels(0, 2) + _labels(1, 2) == 7


def _different(rank: int, world: int) -> None:
    import zeroengine

    engine, *_ = zeroengine.initialize(model=build("llama"), config=sequence("ring", 2, 1))
    engine(**batch("llama", rank))


def test_different_batches_are_an_error() -> None:
    for outcome in run_ranks(_different, 2, timeout=90, failures=True):
        assert "must be given the same batch" in outcome.error and "ranks [1] differs from that of rank 0" in outcome.error


def _loader(rank: int, world: int) -> tuple[list[int], int]:
    import zeroengine

    data = [{"input_ids": torch.full((8,), i), "labels": torch.full((8,), i)} for i in range(16)]
    engine, _, loader, _ = zeroengine.initialize(model=build("llama"), config=sequence("ring", 2, 1), training_data=data)
    ids = [int(i) for made in loader for i in made["input_ids"][:, 0]]
    engine.train_batch()
    return ids, engine.batch.train


def test_loader_gives_a_sequence_group_the_same_samples() -> None:
    got = run_ranks(_loader, 4, timeout=120)
    assert got[0] == got[1] and got[2] == got[3] and got[0][1] == 4
    assert sorted(got[0][0] + got[2][0]) == list(range(16))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mesh": {"cp": 3}}, r"cp 3"),
        ({"mesh": {"cp": 2}, "sequence_parallel": {"attention": "usp", "ulysses": 3}}, r"3 does not divide the 2 ranks"),
        ({"mesh": {"cp": 2}, "sequence_parallel": {"attention": "usp"}}, r"go together"),
    ],
)
def test_impossible_degrees(changes: dict[str, Any], says: str) -> None:
    for outcome in run_ranks(_refused, 2, changes, says, timeout=60):
        assert outcome


def _refused(rank: int, world: int, changes: dict[str, Any], says: str) -> bool:
    import zeroengine
    from zeroengine.errors import ConfigError

    with pytest.raises(ConfigError, match=says):
        zeroengine.initialize(model=build("llama"), config=settings(1, **changes))
    return True


def _other_models(rank: int, world: int) -> bool:
    import zeroengine
    from zeroengine.errors import ModelError

    with pytest.raises(ModelError, match=r"no transformers model"):
        zeroengine.initialize(model=torch.nn.Linear(4, 4), config=settings(1, mesh={"cp": 2}))
    return True


def test_other_models_are_refused() -> None:
    assert all(run_ranks(_other_models, 2, timeout=60))
