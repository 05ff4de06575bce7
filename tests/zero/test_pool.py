"""Which buffer serves a request."""

from __future__ import annotations

import torch

from zeroengine.zero.pool import BufferPool

_CPU = torch.device("cpu")


def _taken(pool: BufferPool, numel: int) -> torch.Tensor:
    return pool.take(numel, torch.float32, _CPU)


def test_a_buffer_serves_requests_of_half_its_size_and_more() -> None:
    pool = BufferPool()
    big, small = _taken(pool, 4096), _taken(pool, 1024)
    at, other = big.data_ptr(), small.data_ptr()
    pool.give(big)
    del big
    assert _taken(pool, 1600).data_ptr() != at  # less than half: memory of its own
    half = _taken(pool, 2048)
    assert half.data_ptr() == at and half.numel() == 2048
    pool.give(small)
    del small
    pool.give(half)
    del half
    assert _taken(pool, 1024).data_ptr() == other  # the smallest that will do
    assert pool.bytes() == 4096 * 4


def test_a_buffer_that_somebody_refers_to_is_not_used_again() -> None:
    pool = BufferPool()
    buffer = _taken(pool, 512)
    view = buffer[:3].fill_(7.0)
    pool.give(buffer)
    del buffer
    assert pool.bytes() == 0 and _taken(pool, 512).data_ptr() != view.data_ptr() and view.tolist() == [7.0] * 3
