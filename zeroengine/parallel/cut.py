"""A shared sequence whose ranks are given their own tokens, as DeepSpeed's data loaders for Ulysses hand them out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.errors import ConfigError
from zeroengine.parallel.hf import SharedSequences, batch_shape, leave_out_cache
from zeroengine.parallel.hf_attention import RunningBatch
from zeroengine.parallel.masks import documents_from_positions


class CutSequences(SharedSequences):
    """Each rank of the group calls with its own tokens: of `n` ranks the i-th has the i-th contiguous n-th of the sequence.

    `position_ids` are those in the whole sequence. They and a 2-D `attention_mask` tell the ranks where documents and padding
    lie. The model computes logits and loss of the tokens that it is given, and what the loss over the ranks is the script says:
    gradients are averaged over all ranks.
    """

    def _call(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        batch, local = batch_shape(inputs)
        leave_out_cache(inputs, self._accepted)
        positions, mask = inputs.get("position_ids"), inputs.pop("attention_mask", None)
        if positions is None and "position_ids" in self._accepted:
            raise ConfigError(
                'sequence_parallel.batches is "cut": give position_ids, those of this rank\'s tokens in the whole sequence; without '
                "them every rank would count from 0"
            )
        labels = inputs.get("labels")
        if labels is not None and inputs.get("shift_labels") is None and self._causal_targets:
            raise ConfigError(
                'sequence_parallel.batches is "cut": give shift_labels, the labels of the next tokens, cut like input_ids; a rank does '
                "not know the token after its last one"
            )
        documents = self._documents(batch, local, positions, mask)
        output = self._attend(model, inputs, RunningBatch(self.group.layout(local * self.group.size), documents))
        self._note_open(model, output)
        return output

    def _documents(self, batch: int, local: int, positions: Any, mask: Any) -> Tensor | None:
        """Document numbers [B, S] of the whole sequences on the host, -1 for padding; None for one document without padding."""
        told = torch.zeros(2, batch, local, dtype=torch.int64)
        told[0] = torch.arange(local) + self.group.rank * local
        for name, value, row in (("position_ids", positions, told[0]), ("attention_mask", mask, told[1].fill_(1))):
            if value is None:
                continue
            if not isinstance(value, Tensor) or value.dim() != 2 or value.shape[0] not in (1, batch) or value.shape[1] != local:
                raise ConfigError(f"'{name}' must be [{batch}, {local}], cut like input_ids; it was {getattr(value, 'shape', value)}")
            row.copy_(value)
        table = self._same.exchange(told.reshape(-1), "positions and padding of a shared sequence")
        ranks = table[:: self._same.size // self.group.size].view(self.group.size, 2, batch, local)
        whole = ranks.permute(1, 2, 0, 3).reshape(2, batch, -1)
        documents = documents_from_positions(whole[0]).masked_fill(whole[1] == 0, -1)
        return documents if bool((documents != 0).any()) else None
