"""Attention over a shared sequence as attention functions of Hugging Face transformers.

`register()` makes `attn_implementation="zero_ulysses" | "zero_ring" | "zero_usp"` known. The function finds its ranks and the
placement of the running batch on the attention module itself (`connect`), so that models in one process are independent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.errors import ConfigError, ModelError
from zeroengine.parallel.group import SequenceGroup
from zeroengine.parallel.layout import SequenceLayout
from zeroengine.parallel.masks import AttentionMask

NAMES = ("zero_ulysses", "zero_ring", "zero_usp")
_ATTRIBUTE = "_zero_sequence"
_REFUSED = ("softcap", "s_aux", "head_mask", "position_bias")


@dataclass
class RunningBatch:
    """Where the tokens of one batch lie; `documents` [B or 1, padded] on the host."""

    layout: SequenceLayout
    documents: Tensor | None
    _masks: dict[tuple[bool, int | None], AttentionMask] = field(default_factory=dict)

    @property
    def facts(self) -> tuple[int, Tensor | None]:
        """What another rank with the same tokens needs: see `of`."""
        return self.layout.length, self.documents

    @staticmethod
    def of(group: SequenceGroup, facts: tuple[int, Tensor | None]) -> RunningBatch:
        length, documents = facts
        return RunningBatch(group.layout(length), None if documents is None else documents.cpu())

    def same_as(self, other: RunningBatch) -> bool:
        """Tokens lie, and attend, alike."""
        if self.layout != other.layout or (self.documents is None) != (other.documents is None):
            return False
        return self.documents is None or other.documents is None or torch.equal(self.documents, other.documents)

    def valid(self, rank: int) -> Tensor | None:
        """Which of this rank's tokens are no padding, [B or 1, local] on the host; None: all."""
        if self.documents is None:
            if self.layout.padded == self.layout.length:
                return None
            whole = torch.ones(1, self.layout.length, dtype=torch.bool)
        else:
            whole = self.documents[:, : self.layout.length] != -1
        return self.layout.shard(whole, rank, fill=0)

    def mask(self, causal: bool, window: int | None) -> AttentionMask:
        found = self._masks.get((causal, window))
        if found is None:
            found = self._masks[causal, window] = AttentionMask(causal, window, self.documents).over(self.layout)
        return found


@dataclass
class SequenceLink:
    """What the attention modules of one model share."""

    group: SequenceGroup
    batch: RunningBatch | None = None
    calls: int = 0
    running: bool = False  # inside the engine's forward

    def valid(self, mask: Tensor | None = None) -> Tensor | None:
        """Which of this rank's tokens are no padding; None: all. `mask` of the model's call was taken out of it before."""
        return None if self.batch is None else self.batch.valid(self.group.rank)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _unlinked, ()  # a copy of the model belongs to no engine


def _unlinked() -> None:
    return None


def register() -> None:
    """Makes the three names known to transformers. Repeating it changes nothing."""
    from transformers import AttentionInterface

    for name in NAMES:
        AttentionInterface.register(name, attention_forward)


def connect(model: nn.Module, link: SequenceLink) -> None:
    """Tells every module of `model` its ranks."""
    for module in model.modules():
        object.__setattr__(module, _ATTRIBUTE, link)


def disconnect(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, _ATTRIBUTE):
            object.__delattr__(module, _ATTRIBUTE)


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """query [B, H, local, D], key and value [B, G, local, D]; returns [B, local, H, D] and no weights.

    Raises `ModelError` for what it would have to leave out: soft caps, sinks, biases, cross attention, a cache.
    """
    who = type(module).__name__
    link: SequenceLink | None = getattr(module, _ATTRIBUTE, None)
    if link is None:
        raise ModelError(
            f"{who}: attn_implementation zero_* needs zeroengine.initialize with `mesh.cp` in the config, which tells the model "
            'its ranks; use "sdpa" outside the engine'
        )
    if link.batch is None:
        raise ModelError(f"{who} was called outside the engine's forward; call the engine, not its module")
    asked = [name for name in _REFUSED if kwargs.get(name) is not None]
    if asked:
        raise ModelError(f"{who} asks for {', '.join(asked)}, which attention over a shared sequence does not compute; set mesh.cp to 1")
    local = link.batch.layout.local
    if query.shape[2] != local or key.shape[2] != local:
        raise ModelError(
            f"{who}: {query.shape[2]} query and {key.shape[2]} key tokens where this rank holds {local}: cross attention and "
            "caches cannot run over a shared sequence; set mesh.cp to 1"
        )
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    link.calls += 1
    out = link.group.attention(
        query, key, value, link.batch.layout, link.batch.mask(causal, window), scale=scaling, dropout=dropout,
        subject=f"attention {getattr(module, 'layer_idx', who)}",
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def ulysses_degree(name: str, cp: int, wanted: int | None) -> int:
    """Ranks that trade heads under an attention name (with or without `zero_`)."""
    kind = name.removeprefix("zero_")
    if kind == "usp":
        if wanted is None:
            raise ConfigError('sequence_parallel.ulysses is missing: "usp" splits mesh.cp into ulysses x ring')
        return wanted
    return cp if kind == "ulysses" else 1
