"""Tiny mixtures of experts of transformers, and five steps of training."""

from __future__ import annotations

from typing import Any

import torch

VOCAB, LENGTH, ROWS = 32, 12, 4
_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    max_position_embeddings=32, tie_word_embeddings=False,
)  # fmt: skip


def build(kind: str) -> Any:
    import transformers as hf

    torch.manual_seed(5)
    if kind in ("mixtral", "mixtral aux"):
        config = hf.MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2, output_router_logits=kind == "mixtral aux",
                                  router_aux_loss_coef=0.1)  # fmt: skip
        return hf.MixtralForCausalLM(config)
    if kind == "qwen2":
        return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(
            **_SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=20,
        ))  # fmt: skip
    if kind in ("qwen3", "qwen3 aux"):
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(
            **_SHAPE, num_experts=8, num_experts_per_tok=4, moe_intermediate_size=12, head_dim=8, norm_topk_prob=True,
            output_router_logits=kind == "qwen3 aux", router_aux_loss_coef=0.1,
        ))  # fmt: skip
    if kind == "deepseek":
        return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(
            **_SHAPE, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, n_shared_experts=1, first_k_dense_replace=1,
            moe_intermediate_size=12, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
        ))  # fmt: skip
    if kind == "glm4":
        return hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(
            **_SHAPE, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1,
            moe_intermediate_size=12,
        ))  # fmt: skip
    if kind == "ernie":  # its shared experts come first
        return hf.Ernie4_5_MoeForCausalLM(hf.Ernie4_5_MoeConfig(
            **_SHAPE, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_intermediate_size=12, moe_layer_start_index=0,
        ))  # fmt: skip
    if kind == "gpt-oss":
        shape = {**_SHAPE, "head_dim": 8}
        return hf.GptOssForCausalLM(hf.GptOssConfig(**shape, num_local_experts=4, num_experts_per_tok=2))
    return hf.OlmoeForCausalLM(hf.OlmoeConfig(**_SHAPE, num_experts=4, num_experts_per_tok=2))


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(50 + step))
    return {"input_ids": ids, "labels": ids}


def settings(ep: int, stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, "mesh": {"ep": ep}, "steps_per_print": None,
        **more,
    }  # fmt: skip


def train(rank: int, world: int, runs: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    import zeroengine

    found = []
    for kind, config in runs:
        model = build(kind)
        kinds = [type(m).__name__ for m in model.modules()]
        names = list(model.state_dict())
        engine, *_ = zeroengine.initialize(model=model, config=config)
        assert any(type(m).__name__ == "SharedStackedExperts" for m in model.modules())
        losses = []
        at, rows = engine.mesh.sample_group, ROWS // engine.mesh.sample_groups
        for step in range(5):
            mine = {n: t[at * rows : (at + 1) * rows] for n, t in batch(step).items()}
            loss = engine(**mine).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        whole = engine.full_state_dict()
        engine.destroy()
        found.append({
            "losses": losses, "whole": whole, "back": {n: v.clone() for n, v in model.state_dict().items()},
            "same": kinds == [type(m).__name__ for m in model.modules()] and names == list(model.state_dict()),
        })  # fmt: skip
    return found


def reference(kind: str, bias_speed: float = 0.0) -> dict[str, Any]:
    """The original's own run in one process. `bias_speed`: of the biases of DeepSeek-V3's routers."""
    model = build(kind)
    loads: dict[Any, torch.Tensor] = {}

    def count(router: Any, args: Any, out: tuple[torch.Tensor, ...]) -> None:
        loads[router] = torch.bincount(out[2].view(-1), minlength=router.weight.shape[0]).float()

    for module in model.modules():
        if bias_speed and hasattr(module, "e_score_correction_bias"):
            module.register_forward_hook(count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(5):
        loss = model(**batch(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for router, load in loads.items():
            router.e_score_correction_bias += bias_speed * torch.sign(load.mean() - load)
        losses.append(float(loss.detach()))
    return {"losses": losses, "weights": {n: v.clone() for n, v in model.state_dict().items()}}
