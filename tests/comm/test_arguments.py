"""What a communicator refuses, on one rank: the message names the communicator and the subject."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from zeroengine.comm import LocalCommunicator


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.all_gather(torch.zeros(4), torch.zeros(3), "w.7"),
        lambda c: c.all_gather(torch.zeros(4), torch.zeros(4, dtype=torch.float64), "w.7"),
        lambda c: c.all_gather(torch.zeros(4, 4).t(), torch.zeros(16), "w.7"),
        lambda c: c.reduce_scatter(torch.zeros(4), torch.zeros(5), "w.7"),
        lambda c: c.reduce_scatter(torch.zeros(4, dtype=torch.int64), torch.zeros(4), "w.7", scale=0.5),
        lambda c: c.all_reduce(torch.zeros(4), "w.7", op="max", scale=0.5),
        lambda c: c.all_reduce(torch.zeros(4), "w.7", op="prod"),
        lambda c: c.broadcast(torch.zeros(4), 1, "w.7"),
        lambda c: c.all_to_all(torch.zeros(4), torch.zeros(4), "w.7", output_splits=[4]),
        lambda c: c.all_to_all(torch.zeros(4), torch.zeros(4), "w.7", output_splits=[4], input_splits=[3]),
        lambda c: c.send(torch.zeros(4), 0, "w.7"),
        lambda c: c.recv(torch.zeros(4), 2, "w.7"),
    ],
)
def test_refused(call: Callable[[LocalCommunicator], object]) -> None:
    with pytest.raises(ValueError, match=r"w\.7") as caught:
        call(LocalCommunicator("params"))
    assert "params" in str(caught.value)


def test_a_group_of_one_keeps_the_semantics() -> None:
    comm = LocalCommunicator("t", rank=5)
    assert (comm.ranks, comm.rank, comm.size) == ((5,), 0, 1)
    full, shard = torch.zeros(4), torch.arange(4.0)
    comm.all_gather(full, shard, "w").wait()
    assert torch.equal(full, shard)
    comm.reduce_scatter(shard, torch.full((4,), 2.0, dtype=torch.bfloat16), "g", scale=0.5, accumulate=True).wait()
    assert shard.tolist() == [1.0, 2.0, 3.0, 4.0]
    comm.reduce_scatter(shard, shard, "g", scale=2.0).wait()
    assert shard.tolist() == [2.0, 4.0, 6.0, 8.0]
    comm.all_reduce(shard, "n", scale=0.5).wait()
    assert shard.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert comm.exchange(torch.tensor([3, 4]), "e").tolist() == [[3, 4]]
    comm.barrier("b")
    comm.close()
