"""What an operation is, in a few integers that ranks compare before any data moves."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from zeroengine.errors import DivergenceError

KINDS = (
    "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send", "recv", "exchange", "barrier",
    "new_group", "reduce", "gather", "scatter",
)  # fmt: skip
SUBJECT_BYTES = 256
_KIND_CODE = {kind: i for i, kind in enumerate(KINDS)}
_DTYPES: tuple[torch.dtype, ...] = tuple(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str))
_DTYPE_CODE = {dtype: i for i, dtype in enumerate(_DTYPES)}


@lru_cache(maxsize=4096)
def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True)
class Fingerprint:
    """One operation as issued by one rank. `detail` holds what else must agree (source rank, reduction, scale, ...)."""

    kind: str
    subject: str
    numel: int
    dtype: torch.dtype
    detail: str = ""

    WIDTH = 6
    PACKED = WIDTH * 8 + SUBJECT_BYTES

    def header(self, index: int) -> list[int]:
        """`WIDTH` signed 64-bit integers; equal on two ranks when the operations are."""
        return [
            index, _KIND_CODE[self.kind], _hash(self.subject), self.numel, _DTYPE_CODE[self.dtype], _hash(self.detail),
        ]  # fmt: skip

    def text(self) -> bytes:
        """Subject and detail in `SUBJECT_BYTES` bytes, for the message of an error."""
        detail = self.detail.encode()[: SUBJECT_BYTES // 4]
        room = SUBJECT_BYTES - len(detail) - 1
        subject = self.subject.encode()
        if len(subject) > room:  # the end of a parameter's name tells more than its beginning
            subject = b"..." + subject[-(room - 3) :]
        return (subject + b"\0" + detail).ljust(SUBJECT_BYTES, b"\0")

    def pack(self, index: int) -> Tensor:
        """Header and text, uint8 [`PACKED`]."""
        header = torch.tensor(self.header(index), dtype=torch.int64)
        return torch.cat([header.view(torch.uint8), torch.frombuffer(bytearray(self.text()), dtype=torch.uint8)])

    def describe(self) -> str:
        return describe(self.kind, self.subject, self.numel, self.dtype, self.detail)


def describe(kind: str, subject: str, numel: int, dtype: torch.dtype, detail: str) -> str:
    size = f", {numel} x {str(dtype).removeprefix('torch.')}" if numel else ""
    return f"{kind} {subject!r}{size}{', ' + detail if detail else ''}"


def header_of(row: Tensor) -> list[int]:
    """The header in a `Fingerprint.pack`."""
    header: list[int] = row[: Fingerprint.WIDTH * 8].clone().view(torch.int64).tolist()
    return header


def decode_packed(row: Tensor) -> str:
    """As `decode`, from a `Fingerprint.pack`."""
    return decode(header_of(row), bytes(row[Fingerprint.WIDTH * 8 :].tolist()))


def decode(header: Sequence[int], text: bytes) -> str:
    """The description of a rank's operation from its header and its text."""
    subject, _, detail = text.partition(b"\0")
    kind = KINDS[header[1]] if 0 <= header[1] < len(KINDS) else f"operation code {header[1]}"
    dtype = _DTYPES[header[4]] if 0 <= header[4] < len(_DTYPES) else torch.uint8
    what = describe(kind, subject.decode(errors="replace"), header[3], dtype, detail.rstrip(b"\0").decode(errors="replace"))
    return f"operation {header[0]}: {what}"


def divergence(name: str, rank: int, lines: Sequence[tuple[int, str]]) -> DivergenceError:
    """The error of every rank when operations differ; `lines` are (global rank, description)."""
    return DivergenceError(
        f"rank {rank}: ranks issued different operations on communicator {name!r}:\n"
        + "\n".join(f"  {line}" for line in _grouped(lines))
        + "\nEvery rank must run the same modules with the same shapes in the same order; look for a branch that "
        "depends on the rank or on its data at the operations named above."
    )


def _grouped(lines: Sequence[tuple[int, str]]) -> list[str]:
    """One line for each different description, with the ranks that share it: short at a thousand ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, text in lines:
        ranks.setdefault(text, []).append(rank)
    return [f"{name_ranks(members)}: {text}" for text, members in ranks.items()]


def name_ranks(ranks: Sequence[int], limit: int = 8) -> str:
    """'rank 3', 'ranks 0, 1, 2', or the first few and a count."""
    shown = ", ".join(str(r) for r in ranks[:limit])
    rest = f" and {len(ranks) - limit} more" if len(ranks) > limit else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{rest}"


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as 1-D uint8: what is only moved needs no support for its dtype."""
    return tensor.detach().view(-1).view(torch.uint8)
