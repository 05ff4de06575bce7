"""The small models of the test-bed, their data, and what one process makes of them by plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

STEPS, SAMPLES, LENGTH = 3, 8, 11
"""Steps of a run, samples of a global micro-batch, tokens of a sample: no number of ranks divides the last."""
CLIP, RATE, EPS = 0.5, 5e-3, 1e-3
"""`EPS` is large beside the gradients, so that a wrong factor on them changes weights."""
SCALE_POWER = 8
"""Of the first loss scale in fp16."""
SPOILED_STEP = 1
"""In fp16: the step in which one rank's gradient is made infinite."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Trained:
    """What a run is compared by. `losses` of the global batch, `norms` before clipping, `weights` as a state_dict."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    scale: float = 1.0
    skipped: int = 0
    loads: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the experts of each layer in the last step
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)  # bytes by kind: planned, measured


def build(kind: str, dropout: float = 0.0) -> nn.Module:
    """`gpt`: GPT-2 with a tied embedding of an odd number of rows. `moe`: Mixtral, one of whose experts gets no token; `moe aux`: with
    the loss of its routers."""
    import transformers as hf

    torch.manual_seed(7)
    if kind == "gpt":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=61,
                n_embd=20,
                n_layer=4,
                n_head=4,
                n_positions=32,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
            )  # fmt: skip
        ).train()
    model = hf.MixtralForCausalLM(
        hf.MixtralConfig(
            vocab_size=64,
            hidden_size=24,
            intermediate_size=16,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=32,
            sliding_window=None,
            output_router_logits=kind == "moe aux",
            router_aux_loss_coef=0.5,
        )  # fmt: skip
    )
    _choose_clearly(model)
    return model.train()


@torch.no_grad()
def _choose_clearly(model: Any) -> None:
    """Routers tell three kinds of tokens apart by three large entries of their embeddings. Choices are far from equal scores, so
    that rounding, which depends on where a sum is cut, changes none; nobody chooses the last expert."""
    table = model.get_input_embeddings().weight
    table[:, :3] = 0.0
    for token in range(table.shape[0]):
        table[token, token % 3] = 1.0
    wanted = torch.tensor([[2.0, -1.0, 1.0], [1.0, 2.0, -1.0], [-1.0, 1.0, 2.0], [-3.0, -3.0, -3.0]])
    for name, p in model.named_parameters():
        if name.endswith("gate.weight"):
            p[:, :3] = 0.5 * wanted


def batch(kind: str, step: int, micro: int) -> dict[str, Tensor]:
    """A global micro-batch [SAMPLES, LENGTH]; in every sample the first two tokens have no loss."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    ids = torch.randint(1, 61, (SAMPLES, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, :2] = -100
    return {"input_ids": ids, "labels": labels}


def part(kind: str, step: int, micro: int, group: int, groups: int) -> dict[str, Tensor]:
    """The rows of one group of ranks."""
    each = SAMPLES // groups
    return {n: t[group * each : (group + 1) * each].contiguous() for n, t in batch(kind, step, micro).items()}


def reference(kind: str, dtype: str, accumulation: int, steps: int = STEPS) -> Trained:
    """One process and plain torch: fp32 masters, weights in `dtype`, gradients added up in fp32, a loss scale for fp16."""
    model, masters = build(kind), build(kind)
    pairs = list(zip(masters.parameters(), model.parameters(), strict=True))
    for _, p in pairs:  # buffers keep their type
        p.data = p.data.to(DTYPES[dtype])
    optimizer = torch.optim.AdamW(masters.parameters(), lr=RATE, eps=EPS)
    scale = 2.0**SCALE_POWER if dtype == "fp16" else 1.0
    found = Trained([], [], {})
    for step in range(steps):
        total = 0.0
        for micro in range(accumulation):
            loss = model(**batch(kind, step, micro), use_cache=False).loss
            (loss.float() * scale).backward()
            total += float(loss.detach())
            for master, p in pairs:
                if p.grad is not None:
                    grad = p.grad.float() / (accumulation * scale)
                    master.grad = grad if master.grad is None else master.grad + grad
                    p.grad = None
        found.losses.append(total / accumulation)
        if dtype == "fp16" and step == SPOILED_STEP:
            found.norms.append(float("inf"))
            scale /= 2
            found.skipped += 1
        else:
            found.norms.append(float(nn.utils.clip_grad_norm_(masters.parameters(), CLIP)))
            optimizer.step()
        optimizer.zero_grad()
        for master, p in pairs:
            p.data.copy_(master.data)
    found.weights = {n: v.detach().clone() for n, v in model.state_dict().items()}
    found.scale = scale
    return found
