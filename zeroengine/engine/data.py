"""The data loader that `initialize` makes from `training_data`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from zeroengine.config import Config
from zeroengine.errors import ConfigError
from zeroengine.logging import log_rank0, warn_rank0
from zeroengine.mesh import Mesh


class EngineLoader:
    """Batches for this data-parallel rank; every pass is an epoch with its own order. Each rank gets another part of the
    samples, all ranks the same number of batches. Of an `IterableDataset`, which keeps its own order, rank r of N takes samples
    r, r + N, ... and what does not go round is left out; one that was split by rank already (by
    `datasets.distributed.split_dataset_by_node`) is taken as it is.

    `epoch` is the number of the running pass, or of the next one between passes; `position` the batches of it that were
    handed out. A pass that is left early is over. The state is saved with a checkpoint, and after `load_state_dict` the
    next pass goes on where the saved one stood. The loader draws nothing from torch's global generator.
    """

    def __init__(
        self, dataset: Dataset[Any], batch_size: int, ranks: int, rank: int, collate_fn: Callable[..., Any] | None,
        drop_last: bool, seed: int,
    ) -> None:  # fmt: skip
        self.batch_size = batch_size
        self.epoch = 0
        self.position = 0
        self._ranks = ranks
        self._seed = seed
        self._resumed = False
        self._sampler: _FromPosition | None = None
        if not isinstance(dataset, IterableDataset):
            if not len(dataset):  # type: ignore[arg-type]
                raise ConfigError("training_data is empty; give a dataset with samples")
            if drop_last and len(dataset) < ranks * batch_size:  # type: ignore[arg-type]
                raise ConfigError(
                    f"training_data has {len(dataset)} samples, fewer than one batch of {batch_size} on each of {ranks} ranks, "  # type: ignore[arg-type]
                    "and dataloader_drop_last drops incomplete batches"
                )
            order: DistributedSampler[Any] = DistributedSampler(
                dataset, num_replicas=ranks, rank=rank, shuffle=True, seed=seed, drop_last=drop_last
            )
            self._sampler = _FromPosition(order)
        elif ranks > 1:
            dataset = _share_of(dataset, ranks, rank)
        self._generator = torch.Generator()
        self.loader = DataLoader(
            dataset, batch_size=batch_size, sampler=self._sampler, collate_fn=collate_fn, drop_last=drop_last,
            generator=self._generator,
        )  # fmt: skip
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        """Starts a pass, or goes on with the one that was loaded."""
        if self.position and not self._resumed:
            self.epoch, self.position = self.epoch + 1, 0
        self._resumed = False
        self._generator.manual_seed(self._seed + self.epoch)
        if self._sampler is None:
            return self._counted(islice(iter(self.loader), self.position, None), self.epoch)
        self._sampler.order.set_epoch(self.epoch)
        self._sampler.start = self.position * self.batch_size
        return self._counted(iter(self.loader), self.epoch)

    def _counted(self, batches: Iterator[Any], epoch: int) -> Iterator[Any]:
        for batch in batches:
            self.position += 1
            yield batch
        if self.epoch == epoch:  # else another pass was started meanwhile
            self.epoch, self.position = epoch + 1, 0

    def __len__(self) -> int:
        """Batches of a whole pass."""
        if self._sampler is None:
            return len(self.loader)
        full, rest = divmod(len(self._sampler.order), self.batch_size)
        return full + int(rest > 0 and not self.loader.drop_last)

    def state_dict(self) -> dict[str, int]:
        """Where the data stands: the same on all ranks. `samples` counts those of the running pass over all ranks."""
        return {"epoch": self.epoch, "samples": self.position * self.batch_size * self._ranks}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next pass goes on from there; with another batch size or number of ranks, with the batch in which it stood."""
        per_batch = self.batch_size * self._ranks
        self.epoch = state["epoch"]
        self.position, rest = divmod(state["samples"], per_batch)
        self._resumed = True
        if rest:
            warn_rank0(
                f"the data stood at sample {state['samples']} of epoch {self.epoch}, inside a batch of {per_batch} as it is cut "
                f"now; the {rest} samples before it come again"
            )


def build_loader(
    dataset: Dataset[Any] | None, batch_size: int, mesh: Mesh, collate_fn: Callable[..., Any] | None, settings: Config
) -> EngineLoader | None:
    """The loader of this rank: ranks that share layers or a sequence get the same batches. None without a dataset."""
    if dataset is None:
        return None
    return EngineLoader(
        dataset, batch_size, mesh.sample_groups, mesh.sample_group, collate_fn,
        settings.dataloader_drop_last, settings.seed or 0,
    )  # fmt: skip


def _share_of(dataset: IterableDataset[Any], ranks: int, rank: int) -> IterableDataset[Any]:
    if getattr(dataset, "_distributed", None) is not None:
        return dataset
    log_rank0(
        f"training_data is an IterableDataset: each of {ranks} data-parallel ranks takes every {ranks}-th sample; if it gives every "
        "rank other samples already, make a DataLoader of it and pass the batches to the engine yourself"
    )
    return _EveryNth(dataset, ranks, rank)


class _EveryNth(IterableDataset[Any]):
    """Samples `rank`, `rank + ranks`, ... of `dataset`, as many on every rank."""

    def __init__(self, dataset: IterableDataset[Any], ranks: int, rank: int) -> None:
        self.dataset, self._ranks, self._rank = dataset, ranks, rank

    def __iter__(self) -> Iterator[Any]:
        mine: Any = None
        for number, sample in enumerate(self.dataset):
            place = number % self._ranks
            if place == self._rank:
                mine = sample
            if place == self._ranks - 1:
                yield mine

    def __len__(self) -> int:
        return len(self.dataset) // self._ranks  # type: ignore[arg-type]


class _FromPosition(Sampler[int]):
    """The indices of `order` from its `start`-th on."""

    def __init__(self, order: DistributedSampler[Any]) -> None:
        self.order = order
        self.start = 0

    def __iter__(self) -> Iterator[int]:
        return islice(iter(self.order), self.start, None)

    def __len__(self) -> int:
        return max(len(self.order) - self.start, 0)
