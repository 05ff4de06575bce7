"""What launcher and hosts say to each other: frames over a pipe or a socket, whoever carries it.

A frame is one letter, four bytes of length and a body: a message (JSON object) or output of a rank. What comes before the
greeting, such as words of a shell's start-up files, is no part of it.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

GREETING = b"\0zerorun link 1\0"
_HEAD = struct.Struct(">cI")
_OUTPUT = struct.Struct(">BI")
_LONGEST = 1 << 26


class LinkError(Exception):
    """The other end does not speak this language."""


@dataclass(frozen=True)
class Output:
    """Bytes that one rank of a host wrote. `stream` is 1 (standard output) or 2 (error)."""

    stream: int
    local_rank: int
    data: bytes


def pack(message: Message) -> bytes:
    """A message as a frame. Text that is not Unicode (names of files, values of variables) survives as surrogates."""
    body = json.dumps(message).encode("ascii")
    return _HEAD.pack(b"M", len(body)) + body


def pack_output(output: Output) -> bytes:
    body = _OUTPUT.pack(output.stream, output.local_rank) + output.data
    return _HEAD.pack(b"O", len(body)) + body


class Decoder:
    """Takes bytes as they come, gives frames. `noise` is what came before the greeting."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.greeted = False
        self.noise = b""

    def feed(self, data: bytes) -> list[Message | Output]:
        """Raises `LinkError` for what is no frame."""
        self._buffer += data
        if not self.greeted:
            before, found, after = bytes(self._buffer).partition(GREETING)
            self.noise = before[-4096:]
            if not found:
                return []
            self.greeted, self._buffer = True, bytearray(after)
        frames: list[Message | Output] = []
        at = 0
        while len(self._buffer) - at >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._buffer, at)
            if kind not in (b"M", b"O") or length > _LONGEST:
                raise LinkError(f"{bytes(self._buffer[at : at + 40])!r} is no frame")
            start, end = at + _HEAD.size, at + _HEAD.size + length
            if end > len(self._buffer):
                break
            frames.append(self._frame(kind, bytes(self._buffer[start:end])))
            at = end
        del self._buffer[:at]
        return frames

    @staticmethod
    def _frame(kind: bytes, body: bytes) -> Message | Output:
        try:
            if kind == b"O":
                stream, local_rank = _OUTPUT.unpack_from(body)
                return Output(stream, local_rank, body[_OUTPUT.size :])
            message = json.loads(body)
            if isinstance(message, dict):
                return message
        except (ValueError, struct.error) as error:
            raise LinkError(f"a frame cannot be read: {error}") from None
        raise LinkError("a message is no object")


class Writer:
    """Writes without ever waiting: what the other end does not take yet is kept."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._buffer = bytearray()
        self.broken = False
        os.set_blocking(fd, False)

    @property
    def waiting(self) -> int:
        """Bytes that are not written yet."""
        return len(self._buffer)

    def put(self, frame: bytes) -> None:
        if not self.broken:
            self._buffer += frame
            self.flush()

    def flush(self) -> None:
        try:
            while self._buffer:
                del self._buffer[: os.write(self.fd, self._buffer[:65536])]
        except BlockingIOError:
            return
        except OSError:  # nobody reads any more: seen at the reading end, as the end of the link
            self.broken = True
            self._buffer.clear()
