"""Small transformers models with random weights, their data, and training in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, STEPS, BATCH = 64, 5, 2
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 128}


KINDS = ("llama", "qwen", "gpt2", "gemma", "bert")
Losses = tuple[list[float], list[float]]


def build(kind: str, layers: int = 2) -> nn.Module:
    """A model in fp32 (fp64 if its name ends in 64) without dropout, the same in every process. "packed" is a llama with packed
    documents in its batches, "again" one whose blocks are computed again in backward, "gpt2x4" and "qwen4" are of four blocks."""
    import transformers as hf

    if kind.endswith("64"):
        return build(kind.removesuffix("64")).double()
    if kind == "packed":
        return build("llama")
    if kind in ("gpt2x4", "qwen4"):
        return build(kind[:4], layers=4)
    if kind == "again":
        model = build("llama")
        model.activation_checkpointing_enable()  # type: ignore[operator]
        return model
    torch.manual_seed(7)
    ffn, heads = {"intermediate_size": 48}, {"num_attention_heads": 4}
    if kind == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **ffn, num_attention_heads=8, num_key_value_heads=2))
    elif kind == "mqa":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **ffn, **heads, num_key_value_heads=1))
    elif kind == "qwen":
        model = hf.Qwen2ForCausalLM(
            hf.Qwen2Config(**{**SMALL, "num_hidden_layers": layers}, **ffn, **heads, num_key_value_heads=2, tie_word_embeddings=True)
        )
    elif kind == "mistral":
        model = hf.MistralForCausalLM(hf.MistralConfig(**SMALL, **ffn, **heads, num_key_value_heads=2, sliding_window=6))
    elif kind == "mixtral":
        model = hf.MixtralForCausalLM(
            hf.MixtralConfig(**SMALL, **ffn, **heads, num_key_value_heads=2, num_local_experts=2, sliding_window=None)
        )
    elif kind == "gemma":
        model = hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(
                **SMALL,
                **ffn,
                **heads,
                num_key_value_heads=2,
                head_dim=8,
                sliding_window=5,
                layer_types=["sliding_attention", "full_attention"],
            )  # fmt: skip
        )
    elif kind == "gpt2":
        model = hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=VOCABULARY, n_embd=32, n_layer=layers, n_head=4, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
            )  # fmt: skip
        )
    elif kind == "opt":
        model = hf.OPTForCausalLM(hf.OPTConfig(**SMALL, **heads, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0, attention_dropout=0.0))
    else:
        model = hf.BertForMaskedLM(hf.BertConfig(**SMALL, **ffn, **heads, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    return model.train()


def batch(kind: str, step: int, group: int = 0, length: int = 27, uneven: bool = True) -> dict[str, Tensor]:
    """One micro-batch of a data-parallel group, with some labels missing (`uneven`: not as many in each group); BERT's also has
    padding."""
    generator = torch.Generator().manual_seed(100 * step + group)
    ids = torch.randint(0, VOCABULARY, (BATCH, length), generator=generator)
    labels = ids.clone()
    labels[0, : 3 + 4 * group * uneven] = -100
    made = {"input_ids": ids, "labels": labels}
    if kind == "bert":
        mask = torch.ones_like(ids)
        mask[1, length - 5 :] = 0
        made["attention_mask"] = mask
        labels[1, length - 5 :] = -100
    if kind == "packed":
        made["position_ids"] = torch.cat([torch.arange(10), torch.arange(length - 10)])[None].expand(BATCH, -1).contiguous()
    return made


def settings(stage: int, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-5}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "bucket_size": 3000},
        "steps_per_print": None,
        "health": {"comm_timeout": 30},
        **changes,
    }


def reference(kind: str, groups: int = 1, clipping: float = 0.5, uneven: bool = True) -> Losses:
    """Losses and gradient norms of one process on the batches of all data-parallel groups: the mean over valid tokens."""
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    losses, norms = [], []
    for step in range(STEPS):
        outs, counts = [], []
        for g in range(groups):
            made = batch(kind, step, g, uneven=uneven)
            outs.append(model(**made, use_cache=False) if kind != "bert" else model(**made))
            valid = made["labels"] != -100
            counts.append(int(valid.sum() if kind == "bert" else valid[:, 1:].sum()))
        loss = sum((o.loss * n for o, n in zip(outs, counts, strict=True)), torch.zeros(())) / sum(counts)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clipping or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def train(rank: int, world: int, runs: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Losses]:
    """Losses and norms of this rank under the engine, for each (kind, configuration)."""
    return {label: train_one(*run) for label, run in runs.items()}


def train_one(kind: str, config: dict[str, Any]) -> Losses:
    import zeroengine

    engine, *_ = zeroengine.initialize(model=build(kind), config=config)
    uneven = engine.sequences is not None  # other models average the loss of their own batch
    losses, norms = [], []
    for step in range(STEPS):
        loss = engine(**batch(kind, step, engine.mesh.sample_group, uneven=uneven)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return losses, norms


def error(got: Losses, want: Losses) -> float:
    """Largest relative difference of losses and norms."""
    pairs = [*zip(got[0], want[0], strict=True), *zip(got[1], want[1], strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def tensor(tp: int, stage: int, splits: bool = False, loss: bool = False, **changes: Any) -> dict[str, Any]:
    """Configuration of `tp` ranks that share layers."""
    mesh = {"tp": tp, **changes.pop("mesh", {})}
    return settings(stage, mesh=mesh, tensor_parallel={"sequence_parallel": splits, "loss_parallel": loss}, **changes)


def sequence(attention: str, cp: int, stage: int, **changes: Any) -> dict[str, Any]:
    """Configuration of `cp` ranks that share sequences."""
    own = {k: changes.pop(k) for k in ("ulysses", "layout") if k in changes}
    mesh = {"cp": cp, **changes.pop("mesh", {})}
    return settings(stage, mesh=mesh, sequence_parallel={"attention": attention, **own}, **changes)
