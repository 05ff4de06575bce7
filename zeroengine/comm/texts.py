"""Texts, and bytes of unlike lengths, between ranks."""

from __future__ import annotations

import torch

from zeroengine.comm.protocol import Communicator


def exchange_texts(control: Communicator, text: str, subject: str) -> list[str]:
    """Every rank's text, in the order of the group. Collective."""
    return [data.decode() for data in exchange_bytes(control, text.encode(errors="replace"), subject)]


def exchange_bytes(control: Communicator, data: bytes, subject: str) -> list[bytes]:
    """Every rank's bytes, in the order of the group. Where no rank has any, only that is told. Collective."""
    sizes = [int(n) for n in control.exchange(torch.tensor([len(data)]), f"length of {subject}").flatten()]
    longest = max(sizes)
    if not longest:
        return [b""] * len(sizes)
    rows = control.exchange(torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8), subject)
    return [bytes(row[:size].tolist()) for row, size in zip(rows, sizes, strict=True)]
