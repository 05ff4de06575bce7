"""The data loader that `initialize` makes from `training_data`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zeroengine.errors import ConfigError


class EngineLoader:
    """Batches for this data-parallel rank; every pass is an epoch with its own order. Each rank gets another part of the
    samples, all ranks the same number of batches."""

    def __init__(
        self, dataset: Dataset[Any], batch_size: int, ranks: int, rank: int, collate_fn: Callable[..., Any] | None,
        drop_last: bool, seed: int,
    ) -> None:  # fmt: skip
        self.batch_size = batch_size
        self.epoch = 0
        self._sampler: DistributedSampler[Any] | None = None
        if not isinstance(dataset, IterableDataset):
            if not len(dataset):  # type: ignore[arg-type]
                raise ConfigError("training_data is empty")
            if drop_last and len(dataset) < ranks * batch_size:  # type: ignore[arg-type]
                raise ConfigError(
                    f"training_data has {len(dataset)} samples, fewer than one batch of {batch_size} on each of {ranks} ranks, "  # type: ignore[arg-type]
                    "and dataloader_drop_last drops incomplete batches"
                )
            self._sampler = DistributedSampler(
                dataset, num_replicas=ranks, rank=rank, shuffle=True, seed=seed, drop_last=drop_last
            )
        self.loader = DataLoader(
            dataset, batch_size=batch_size, sampler=self._sampler, collate_fn=collate_fn, drop_last=drop_last
        )
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        if self._sampler is not None:
            self._sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)
