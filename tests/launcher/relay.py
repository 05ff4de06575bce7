"""Carries Ethernet frames between two new TAP devices, late and not all of them.

Command line: `DEVICE DEVICE DELAY LOSS`, with seconds and the share of frames that is dropped. Says `ready` when the devices are there.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _TAP, _NO_INFORMATION = 0x400454CA, 0x0002, 0x1000


def tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_INFORMATION))
    return fd


def main(first: str, second: str, delay: float, loss: float) -> None:
    ends = tap(first), tap(second)
    other = dict(zip(ends, reversed(ends), strict=True))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    waiting: deque[tuple[float, int, bytes]] = deque()  # in the order of their times, as all wait equally long
    drawn = random.Random(1)
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for fd in select.select(ends, (), (), timeout)[0]:
            frame = os.read(fd, 65536)
            if drawn.random() >= loss:
                waiting.append((time.monotonic() + delay, other[fd], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, fd, frame = waiting.popleft()
            try:
                os.write(fd, frame)
            except OSError:  # the device is not up yet
                continue


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
