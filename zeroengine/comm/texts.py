"""Texts between ranks."""

from __future__ import annotations

import torch

from zeroengine.comm.protocol import Communicator


def exchange_texts(control: Communicator, text: str, subject: str) -> list[str]:
    """Every rank's text, in the order of the group. Collective."""
    mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    sizes = [int(n) for n in control.exchange(torch.tensor([mine.numel()]), f"length of {subject}").flatten()]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: mine.numel()] = mine
    rows = control.exchange(padded, subject)
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]
