"""What the ranks run for several engines in one process, and for adapters that are merged."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.integrations.tiny import stand_in

STEPS = 3


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(4)
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return generator, critic


def noise(rank: int, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """(input of the generator, real samples)."""
    source = torch.Generator().manual_seed(100 * rank + 10 * step + micro)
    return torch.randn(4, 4, generator=source), torch.randn(4, 8, generator=source)


def critic_loss(critic: nn.Module, made: Tensor, real: Tensor) -> Tensor:
    return critic(made).mean() - critic(real).mean() + 0.1 * critic(real).square().mean()


def reference(world: int, micro: int) -> list[Tensor]:
    """Both kinds of training by torch alone, on the data of all ranks. `micro`: micro-batches of the generator's step."""
    g, d = nets()
    og, od = torch.optim.SGD(g.parameters(), lr=0.1), torch.optim.SGD(d.parameters(), lr=0.1)
    for step in range(STEPS):
        for m in range(micro):
            for rank in range(world):
                (-d(g(noise(rank, step, m)[0])).mean() / world / micro).backward()
        og.step()
        og.zero_grad()
        od.zero_grad()
        for rank in range(world):
            z, real = noise(rank, step)
            (critic_loss(d, g(z).detach(), real) / world).backward()
        od.step()
        od.zero_grad()
        for rank in range(world):  # one loss for both
            z, real = noise(rank, step, 7)
            ((critic_loss(d, g(z), real)) / world).backward()
        for o in (og, od):
            o.step()
            o.zero_grad()
    return [p.detach().clone() for model in (g, d) for p in model.parameters()]


def run(rank: int, world: int, pretrained: str) -> dict[str, Any]:
    """All of this file."""
    stand_in()
    return {
        "adversaries": adversaries(rank, world, [1, 2, 3]), "reference": actor_and_reference(rank), "merging": merging(pretrained),
    }  # fmt: skip


def adversaries(rank: int, world: int, stages: list[int]) -> dict[str, float]:
    """Largest difference of two engines that share losses from torch alone, by stage and micro-batches."""
    return {f"stage {s}, {m} micro-batches": _adversaries(rank, world, s, m) for s in stages for m in (1, 2)}


def _engine(model: nn.Module, stage: int, micro: int = 1, trains: bool = True) -> Any:
    import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": micro, "zero_optimization": {"stage": stage},
    }  # fmt: skip
    if trains:
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    return deepspeed.initialize(model=model, config=config)[0]


def _adversaries(rank: int, world: int, stage: int, micro: int) -> float:
    import deepspeed

    expected = reference(world, micro)
    g, d = nets()
    eg, ed = _engine(g, stage, micro), _engine(d, stage)
    for step in range(STEPS):
        for m in range(micro):
            eg.backward(-ed(eg(noise(rank, step, m)[0])).mean())
            eg.step()
        ed.zero_grad()
        z, real = noise(rank, step)
        with torch.no_grad():
            made = eg(z)
        ed.backward(critic_loss(ed, made, real))
        ed.step()
        z, real = noise(rank, step, 7)
        eg.set_gradient_accumulation_boundary(True)
        loss = critic_loss(ed, eg(z), real)
        eg.backward(loss, scale_wrt_gas=False)
        eg.step()
        ed.step()
        eg._boundary = None
        eg.micro_steps = 0
    with deepspeed.zero.GatheredParameters([*g.parameters(), *d.parameters()]):
        got = [p.detach().clone() for model in (g, d) for p in model.parameters()]
    eg.destroy()
    ed.destroy()
    return max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True))


def actor_and_reference(rank: int) -> list[dict[str, Any]]:
    """A model that is trained beside one that is only evaluated, as in preference training."""
    import deepspeed

    results = []
    for stage in (1, 2, 3):
        actor, _ = nets()
        frozen = copy.deepcopy(actor).eval()
        expected = frozen(noise(rank, 0)[0]).detach()
        ea, er = _engine(actor, stage), _engine(frozen, stage, trains=False)
        for step in range(STEPS):
            x = noise(rank, step)[0]
            with torch.no_grad():
                wanted = er(x)
            ea.backward((ea(x) - 2 * wanted).square().mean())
            ea.step()
        with torch.no_grad():
            unchanged = torch.equal(er(noise(rank, 0)[0]), expected)
        with deepspeed.zero.GatheredParameters(actor.parameters()):
            trained = not torch.equal(actor(noise(rank, 0)[0]).detach(), expected)
        results.append({"unchanged": unchanged, "trained": trained, "optimizer": er.optimizer, "cut": hasattr(frozen[0].weight, "ds_id")})
        ea.destroy()
        er.destroy()
    return results


def merging(pretrained: str) -> dict[str, Any]:
    """A LoRA adapter under stage 3: merged inside a gather, and what merging outside says."""
    import deepspeed
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(pretrained)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(base, config)
    engine = _engine(model, 3)
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        adapted = engine(input_ids=ids).logits
    try:
        model.merge_adapter()
        outside = "no error"
    except Exception as error:
        outside = f"{type(error).__name__}: {error}"
    with deepspeed.zero.GatheredParameters(model.parameters()):
        if not model.base_model.model.model.layers[0].self_attn.q_proj.merged:
            model.merge_adapter()
    with torch.no_grad():
        merged = engine(input_ids=ids).logits
    with deepspeed.zero.GatheredParameters(model.parameters()):
        model.unmerge_adapter()
    with torch.no_grad():
        unmerged = engine(input_ids=ids).logits
    engine.destroy()
    return {
        "outside": outside, "merged": float((merged - adapted).abs().max()), "unmerged": float((unmerged - adapted).abs().max()),
    }  # fmt: skip
