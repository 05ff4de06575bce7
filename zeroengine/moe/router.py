"""Which experts a token goes to, with what weights, and what that costs.

All that depends on more than one token, capacity and its losses, is a matter of the global batch: the tokens of all ranks
among which gradients are averaged, in the order of ranks. Results do not depend on how the batch is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroengine.errors import ConfigError
from zeroengine.moe.capacity import Capacity, Priority, kept
from zeroengine.moe.collectives import sum_over_ranks
from zeroengine.moe.group import ExpertGroup, alone
from zeroengine.moe.statistics import Statistics

Score = Literal["softmax", "sigmoid"]
Noise = Literal["none", "jitter", "gumbel"]
_PER_GROUP = 2  # experts by which a group of sigmoid-scored experts is judged


@dataclass(frozen=True)
class RouterRule:
    """How experts are chosen.

    `k` experts a token. Weights are their `score`s ("softmax" over all experts, or "sigmoid" of each), with `normalize`
    divided by their sum over the token's experts, times `scale`. With `groups` > 1 the experts of the best `top_groups` groups
    of neighbours only (DeepSeek-V2 and V3: a group is judged by its best expert, with sigmoid scores by the sum of its
    best two). `noise` in training: "jitter" multiplies the router's input by a number in 1 ± `jitter`; "gumbel" adds Gumbel
    noise to what is compared.

    `capacity`: what an expert takes at most; None drops nothing. `aux_weight` and `z_weight`: factors of the losses that
    `Router` returns. `bias_speed` > 0 balances without a loss (Wang et al., "Auxiliary-Loss-Free Load Balancing", 2024;
    DeepSeek-V3): a bias that only counts in the choice moves by this much at each step, against the load.
    """

    k: int = 1
    score: Score = "softmax"
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    noise: Noise = "none"
    jitter: float = 0.01
    capacity: Capacity | None = None
    aux_weight: float = 1.0
    z_weight: float = 0.0
    bias_speed: float = 0.0

    def check(self, num_experts: int) -> None:
        """Raises `ConfigError` for what cannot be."""
        if not 1 <= self.k <= num_experts:
            raise ConfigError(f"a router with k = {self.k} for {num_experts} experts; k must be from 1 to their number")
        if self.groups < 1 or num_experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ConfigError(
                f"a router with {self.groups} groups, {self.top_groups} chosen, for {num_experts} experts: the groups must divide "
                "the experts, and at least one and at most all be chosen"
            )
        if self.k > num_experts // self.groups * self.top_groups:
            raise ConfigError(f"a router with k = {self.k}, but {self.top_groups} groups have fewer experts; choose more groups")


@dataclass(frozen=True)
class Routing:
    """For T tokens: experts `index` [T, k], the best first, their `weights` [T, k] in fp32, what is not dropped (`keep` [T, k],
    None: everything), and `loss`, the weighted sum of the router's losses, a scalar."""

    index: Tensor
    weights: Tensor
    keep: Tensor | None
    loss: Tensor


class Router(nn.Module):
    """A linear layer over tokens, in fp32 whatever the model's type, and the choice that follows from it.

    `group` knows the ranks that share a batch; `zeroengine.initialize` sets it.
    """

    fp32_buffers = ("bias",)

    def __init__(self, hidden: int, num_experts: int, rule: RouterRule) -> None:
        super().__init__()
        rule.check(num_experts)
        self.num_experts, self.rule = num_experts, rule
        self.weight = nn.Parameter(torch.empty(num_experts, hidden))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32) if rule.bias_speed > 0 else None)
        self.group: ExpertGroup = alone()
        self.subject = "router"
        self.statistics = Statistics(num_experts)

    def forward(self, tokens: Tensor) -> Routing:
        """`tokens` [T, H]. Collective over the batch where there is a capacity, and in training where there is a loss."""
        rule = self.rule
        if self.training and rule.noise == "jitter":
            tokens = tokens * torch.empty_like(tokens).uniform_(1 - rule.jitter, 1 + rule.jitter)
        logits = F.linear(tokens.float(), self.weight.float())
        scores = logits.softmax(-1) if rule.score == "softmax" else logits.sigmoid()
        index = self._choose(logits, scores)
        weights = scores.gather(1, index)
        if rule.normalize:
            weights = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        weights = weights * rule.scale
        keep = self.kept(index, weights.detach())
        seen = self.group.batch.tokens
        loss = self._losses(seen(logits), seen(scores), seen(index))
        self.statistics.record(seen(index), keep, seen(scores), self.training)
        return Routing(index, weights, keep, loss)

    def kept(self, index: Tensor, weights: Tensor) -> Tensor | None:
        """Mask [T, k] of the assignments that the capacity leaves; None: all. Collective over the batch where there is one."""
        capacity = self.rule.capacity
        if capacity is None:
            return None
        return kept(index, weights, self.num_experts, capacity, self.training, self.group.batch.ranks, self.subject)

    @torch.no_grad()
    def _choose(self, logits: Tensor, scores: Tensor) -> Tensor:
        rule = self.rule
        compared = scores
        if self.training and rule.noise == "gumbel":
            uniform = torch.rand_like(logits).clamp_min(torch.finfo(logits.dtype).tiny)
            compared = logits - (-uniform.log()).log()
        if self.bias is not None:
            compared = compared + self.bias
        if rule.groups > 1:
            grouped = compared.view(compared.shape[0], rule.groups, self.num_experts // rule.groups)
            best = grouped.topk(min(_PER_GROUP if rule.score == "sigmoid" else 1, grouped.shape[-1]), -1)[0].sum(-1)
            chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(rule.top_groups, -1)[1], True)
            compared = grouped.masked_fill(~chosen.unsqueeze(-1), float("-inf")).view_as(compared)
        return compared.topk(rule.k, -1)[1]

    def _losses(self, logits: Tensor, scores: Tensor, index: Tensor) -> Tensor:
        """aux_weight * E/k * sum over experts of (share of assignments) * (mean score), 1 for an even load (Fedus et al.,
        "Switch Transformers", 2021), + z_weight * mean of log-sum-exp squared (Zoph et al., "ST-MoE", 2022)."""
        rule = self.rule
        if not self.training or not (rule.aux_weight or rule.z_weight):
            return logits.new_zeros(())
        shares = scores if rule.score == "softmax" else scores / scores.sum(1, keepdim=True)
        z = logits.logsumexp(1).square().sum()
        chosen = index.reshape(-1)
        load = shares.new_zeros(self.num_experts).index_add(0, chosen, shares.new_ones(chosen.numel()))
        tokens = load.new_tensor([float(index.shape[0])])
        batch, subject = self.group.batch, f"{self.subject}: sums of the router's losses"
        sums = sum_over_ranks(torch.cat([shares.sum(0), z.view(1), load, tokens]), batch.ranks, batch.averaged, subject)
        mean, z, load, tokens = sums.split([self.num_experts, 1, self.num_experts, 1])
        tokens = tokens.detach().clamp_min(1.0)
        balance = (mean / tokens * (load.detach() / tokens)).sum() * self.num_experts / rule.k
        return rule.aux_weight * balance + rule.z_weight * (z / tokens).sum()

    def move_bias(self, load: Tensor) -> None:
        """Moves the bias against `load` [E], assignments of the whole batch since the last step."""
        if self.bias is not None:
            move_against(self.bias, load, self.rule.bias_speed)


@torch.no_grad()
def move_against(bias: Tensor, load: Tensor, speed: float) -> None:
    """Moves `bias` [E] by `speed` for each expert: up where its `load` is below the mean of all, down where it is above."""
    load = load.to(device=bias.device, dtype=torch.float32)
    bias.add_(speed * torch.sign(load.mean() - load).to(bias.dtype))


__all__ = ["Capacity", "Noise", "Priority", "Router", "RouterRule", "Routing", "Score"]
