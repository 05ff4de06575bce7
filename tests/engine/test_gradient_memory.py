"""How long gradients take memory, and that it makes no difference to what they are."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

from tests.engine.models import VOCABULARY, TinyLM, config, tokens
from tests.ranks import run_ranks


def _buffers(engine: Any) -> tuple[int, int]:
    """Bytes of flat buffers that live on, and of slices, that there are now."""
    gradients = engine.mechanism.gradients
    return sum(g._home.nbytes for g in gradients if g._home is not None), sum(g._slice.nbytes for g in gradients if g._slice is not None)


def _lives(rank: int, world: int) -> list[str]:
    import zeroengine

    faults = []
    for stage in range(4):
        for accumulation in (1, 2):
            torch.manual_seed(0)
            engine, *_ = zeroengine.initialize(model=TinyLM(), config=config(stage, gradient_accumulation_steps=accumulation))
            whole = sum(4 * b.layout.padded for b in engine.mechanism.buckets)
            keeps = stage == 0 or (stage == 1 and accumulation > 1)
            for step in range(2):
                for micro in range(accumulation):
                    engine.backward(engine(*tokens(step, micro, rank)))
                    engine.optimizer.reducer.finish() if micro == accumulation - 1 else None
                    seen = _buffers(engine)
                    if micro == accumulation - 1 and seen != ((whole, 0) if keeps else (0, whole // world)):
                        faults.append(f"stage {stage}, {accumulation} micro-batches, step {step}: {seen}, whole {whole}")
                    engine.step()
                if (seen := _buffers(engine)) != (whole if keeps else 0, 0):
                    faults.append(f"stage {stage}, {accumulation} micro-batches, between steps: {seen}, whole {whole}")
                told, planned = engine.memory_report()["gradients"], engine.planned_memory()["gradients"]
                if told != planned or told != (whole if keeps else whole // world):
                    faults.append(f"stage {stage}, {accumulation} micro-batches: {told} reported, {planned} planned")
            engine.destroy()
    return faults


@pytest.mark.parametrize("world", [2, 3])
def test_slices_live_from_the_reduction_to_the_update(world: int) -> None:
    for rank, faults in enumerate(run_ranks(_lives, world, timeout=120)):
        assert not faults, f"rank {rank}: {faults}"


def _changes(rank: int, world: int, stage: int) -> list[float]:
    """Steps of one micro-batch, of several that the program adds up by itself, of another number, and of one again."""
    import zeroengine

    torch.manual_seed(0)
    engine, *_ = zeroengine.initialize(model=TinyLM(), config=config(stage, gradient_clipping=0.5))
    losses = []

    def micro_batches(step: int, count: int, *, by_hand: bool = False) -> None:
        for micro in range(count):
            if by_hand:
                engine.set_gradient_accumulation_boundary(micro == count - 1)
            loss = engine(*tokens(step, micro, rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())

    micro_batches(0, 1)
    micro_batches(1, 3, by_hand=True)
    engine.set_gradient_accumulation_boundary(True)
    micro_batches(2, 1)
    loss = engine(*tokens(3, 0, rank))
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)  # after the reductions of the first
    engine.step()
    engine.set_train_batch_size(2 * 2 * world)
    micro_batches(4, 2)
    engine.set_train_batch_size(2 * world)
    micro_batches(5, 1)
    losses.append(engine.get_global_grad_norm())
    engine.destroy()
    return losses


def test_the_number_of_micro_batches_may_change() -> None:
    """To the last bit where one micro-batch after the other is added up before the reduction (stages 0 and 1), or after it."""
    runs = [run_ranks(_changes, 2, stage, timeout=120) for stage in range(4)]
    assert runs[0] == runs[1] and runs[2] == runs[3]
    for one, other in zip(runs[0], runs[2], strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def _tied(rank: int, world: int, stage: int, dtype: str, in_place: bool) -> tuple[list[float], set[tuple[str, ...]]]:
    """Losses, and how the gradients of the tied weight were added up in the backwards."""
    import zeroengine

    torch.manual_seed(0)
    changes: dict[str, Any] = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    with contextlib.nullcontext() if in_place else mock.patch("zeroengine.engine.mechanism.add_in_place", lambda module: ()):
        engine, *_ = zeroengine.initialize(model=TinyLM(), config=config(stage, gradient_accumulation_steps=3, **changes))
    weight, losses, sums = [VOCABULARY, 17], [], set()
    for step in range(2):
        for micro in range(3):
            loss = engine(*tokens(step, micro, rank))
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
                torch.autograd.backward(loss) if micro == 1 else engine.backward(loss)
            found = (e for e in profile.events() if e.name in ("aten::add", "aten::add_") and e.input_shapes[:2] == [weight, weight])
            # What is added up over micro-batches is added by the engine's hook.
            sums.add(tuple(e.name for e in found if e.cpu_parent is None or "AccumulateGrad" not in e.cpu_parent.name))
            engine.step()
            losses.append(loss.item())
    model = engine.module
    engine.destroy()
    assert not any(m._forward_hooks for m in model.modules())
    return losses, sums


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_gradients_of_a_tied_weight_are_added_up_in_place(stage: int, dtype: str) -> None:
    with_it, without = (run_ranks(_tied, 2, stage, dtype, on, timeout=120) for on in (True, False))
    for (losses, sums), (same, others) in zip(with_it, without, strict=True):
        assert losses == same and len(set(losses)) == 6
        assert sums == {("aten::add_",)} and others == {("aten::add",)}
