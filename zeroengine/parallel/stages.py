"""Shared layers and sequences inside the stages of a pipeline: what must be known where a micro-batch is computed.

Activations go from stage to stage as they are: parts of a split or shared sequence stay parts. With them go the number of
tokens and the documents of the micro-batch, from which every stage works out where tokens lie.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zeroengine.errors import ConfigError, ModelError
from zeroengine.parallel.group import SequenceGroup
from zeroengine.parallel.hf import GroupSequences, SequenceAttention, cut_batch, cut_tokens
from zeroengine.parallel.hf_attention import RunningBatch, SequenceLink, connect, disconnect
from zeroengine.parallel.layout import SequenceLayout
from zeroengine.parallel.loss import IGNORED
from zeroengine.parallel.tensor_ops import Region


class StageSequences(GroupSequences):
    """The ranks of `group` share the sequences of a model whose stages are given by their user; their attention is
    `zeroengine.sequence.shared_attention`."""

    def __init__(self, module: nn.Module, group: SequenceGroup) -> None:
        self.group = group
        self.link = SequenceLink(group)
        connect(module, self.link)

    def remove(self, module: nn.Module) -> None:
        disconnect(module)

    def cut(self, inputs: Any) -> tuple[Any, RunningBatch]:
        """This rank's tokens of the inputs, a tree of tensors [batch, tokens, ...], and where all tokens lie."""
        shape = next((t.shape for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.dim() > 1), None)
        if shape is None:
            raise ConfigError("mesh.cp is over 1, and the inputs have no tensor [batch, tokens, ...] to cut; set mesh.cp to 1")
        running = RunningBatch(self.group.layout(shape[1]), None)
        local = tree_map(lambda x: cut_tokens("an input", x, running.layout, self.group.rank, shape[0]), inputs)
        return local, running

    def cut_targets(self, targets: Any, layout: SequenceLayout) -> Tensor:
        """This rank's targets, [batch, tokens] of integers; padding has none."""
        fits = isinstance(targets, Tensor) and targets.dim() == 2 and targets.shape[1] == layout.length
        if not fits or targets.is_floating_point():
            shape = f"{targets.dtype} {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
            raise ModelError(f"mesh.cp is over 1: labels must be integers [batch, {layout.length}], one for each token, not {shape}")
        return layout.shard(targets, self.group.rank, fill=IGNORED)


class StageAttention(SequenceAttention, StageSequences):
    """The same for stages of a transformers model, whose attention functions are exchanged. `accepted`: what its forward takes."""

    def __init__(self, module: nn.Module, group: SequenceGroup, attention: str, forward: Any) -> None:
        SequenceAttention.__init__(self, module, group, attention)
        self._accepted = frozenset(inspect.signature(forward).parameters)

    def cut(self, inputs: Any) -> tuple[dict[str, Any], RunningBatch]:
        local, running = cut_batch({k: v for k, v in inputs.items() if v is not None}, self.group, self._accepted)
        local.pop("use_cache", None)
        return local, running


class StageSharing:
    """Puts what a micro-batch's computations need into force, also where they are repeated in backward."""

    def __init__(self, region: Region | None = None, sequences: StageSequences | None = None) -> None:
        """`region`: of a tensor group that splits sequences between its regions."""
        self._region = region if region is not None and region.splits else None
        self._sequences = sequences
        self._lengths: dict[int, int] = {}
        self._running: dict[int, RunningBatch] = {}

    @property
    def active(self) -> bool:
        return self._region is not None or self._sequences is not None

    def begin(self, micro: int, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Inputs and targets of a micro-batch for this rank, out of those that all ranks of its group have."""
        if self._sequences is None:
            return inputs, targets
        local, running = self._sequences.cut(inputs)
        self._running[micro] = running
        return local, None if targets is None else self._sequences.cut_targets(targets, running.layout)

    def pack(self, micro: int, tree: Any) -> Any:
        """What goes to the next stage."""
        if not self.active:
            return tree
        if self._region is not None:
            self._lengths[micro] = self._region.length
        running = self._running.get(micro)
        return tree, self._lengths.get(micro, 0), None if running is None else running.facts

    def unpack(self, micro: int, given: Any) -> Any:
        """What came from the stage before."""
        if not self.active:
            return given
        tree, length, facts = given
        self._lengths[micro] = length
        if self._sequences is not None and micro not in self._running:
            self._running[micro] = RunningBatch.of(self._sequences.group, facts)
        return tree

    def use(self, micro: int) -> None:
        """A computation of this micro-batch follows."""
        if self._region is not None:
            self._region.length = self._lengths.get(micro, 0)
        if self._sequences is not None:
            self._sequences.link.batch = self._running[micro]

    def length(self) -> int:
        """Tokens of the running micro-batch, where a tensor group has parts of them; else 0."""
        return 0 if self._region is None else self._region.length

    def calls(self) -> int:
        """How often attention over a shared sequence has run."""
        return 0 if self._sequences is None else self._sequences.link.calls

    def clear(self) -> None:
        self._lengths.clear()
        self._running.clear()


def shared_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True, window: int | None = None,
    scale: float | None = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Attention of a layer that may run over a sequence that several ranks share (`mesh.cp`), in a `PipelineModule`.

    query [B, H, tokens, D], key and value [B, G, tokens, D], G a divisor of H; returns [B, H, tokens, Dv]. `module`: the calling layer, by
    which its ranks are found; without any it is torch's scaled_dot_product_attention. `window`: tokens that a query sees.
    Dropout is applied in training mode.
    """
    link: SequenceLink | None = getattr(module, "_zero_sequence", None)
    rate = dropout if module.training else 0.0
    if link is None or link.batch is None:
        mask = None
        if window is not None:
            place = torch.arange(query.shape[2], device=query.device)
            apart = place[:, None] - place
            mask = (apart < window) & ((apart >= 0) if causal else (apart > -window))
        return nn.functional.scaled_dot_product_attention(
            query, key, value, mask, rate, is_causal=causal and mask is None, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    link.calls += 1
    return link.group.attention(
        query, key, value, link.batch.layout, link.batch.mask(causal, window), scale=scale, dropout=rate, subject=type(module).__name__
    )


def token_positions(module: nn.Module, x: Tensor) -> Tensor:
    """Positions in the whole sequence of the tokens in `x` [batch, tokens, ...], int64 [tokens]: 0, 1, 2, ... unless several ranks
    share it. Those of padding are the last one's. `module`: the calling layer."""
    link: SequenceLink | None = getattr(module, "_zero_sequence", None)
    if link is None or link.batch is None:
        return torch.arange(x.shape[1], device=x.device)
    layout = link.batch.layout
    return layout.index(link.group.rank).clamp(max=layout.length - 1).to(x.device)
