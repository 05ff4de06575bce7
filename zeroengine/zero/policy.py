"""The table of ZeRO stages: what stays whole between uses. No other file asks which stage it is.

Stages as in Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeroengine.errors import ConfigError


@dataclass(frozen=True)
class Policy:
    """What a bucket keeps only its own slice of, between uses."""

    shard_params: bool
    shard_grads: bool
    shard_state: bool  # masters and optimizer state

    def over(self, ranks: int) -> Policy:
        """This policy in a shard group of so many ranks. The slice of the only one is the whole: its gradients are added up where they
        stay, as where they are kept whole, and not in a second buffer."""
        return self if ranks > 1 else replace(self, shard_grads=False)


STAGES: dict[int, Policy] = {
    0: Policy(shard_params=False, shard_grads=False, shard_state=False),
    1: Policy(shard_params=False, shard_grads=False, shard_state=True),
    2: Policy(shard_params=False, shard_grads=True, shard_state=True),
    3: Policy(shard_params=True, shard_grads=True, shard_state=True),
}


def policy_for(stage: int, *, persistent: bool = False) -> Policy:
    """The row of `stage`; small parameters that stay resident (`persistent`) keep their values whole."""
    if stage not in STAGES:
        raise ConfigError(f"zero_optimization.stage is {stage}; it must be one of {sorted(STAGES)}")
    return replace(STAGES[stage], shard_params=False) if persistent else STAGES[stage]
