"""Noticing that values were changed by somebody else: cheap sums of a tensor's bits."""

from __future__ import annotations

import torch
from torch import Tensor

_ROW = 1024  # words
_CHUNK = 128 * _ROW  # words; what is summed at a time stays in the cache
_MASK = (1 << 62) - 1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(flat: Tensor) -> int:
    """Sum of the bits of a 1-D contiguous tensor, at the speed of memory. It tells that values changed; it does not see an
    exchange of aligned 8-byte words."""
    raw = flat.view(torch.uint8)
    lead = min(-flat.storage_offset() * flat.element_size() % 8, raw.numel())
    end = lead + (raw.numel() - lead) // 8 * 8
    rest = raw[:lead].sum(dtype=torch.int64) + 257 * raw[end:].sum(dtype=torch.int64)
    return int(raw[lead:end].view(torch.int64).sum() + rest) & _MASK


def digest(flat: Tensor) -> int:
    """As `fingerprint`, and sensitive to where each word lies; for comparing values of ranks. 62 bits."""
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    raw = flat.view(torch.uint8)
    whole = raw.numel() // (8 * _ROW) * (8 * _ROW)
    tail = torch.zeros(8 * _ROW, dtype=torch.uint8, device=raw.device)
    tail[: raw.numel() - whole] = raw[whole:]
    words, last = raw[:whole].view(torch.int64), tail.view(torch.int64)
    across = torch.arange(1, _ROW + 1, device=raw.device)
    result = raw.numel()
    for chunk in (*(words[i : i + _CHUNK] for i in range(0, words.numel(), _CHUNK)), last):
        rows = chunk.view(-1, _ROW)
        down = torch.arange(1, rows.shape[0] + 1, device=raw.device)
        mixed = (rows.sum(0) * across).sum() * 31 + (rows.sum(1) * down).sum()
        result = (result * 1_000_003 + int(mixed)) & _MASK
    return result


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit (NaN equals itself); same dtype and shape. Tensors of the meta device have no values to differ."""
    if a.is_meta or b.is_meta:
        return True
    kind = _INTEGERS.get(a.element_size())
    return torch.equal(a, b) if kind is None else torch.equal(a.view(kind), b.view(kind))
