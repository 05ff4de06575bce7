"""What training scripts ask a pipeline's engine: names and meanings of DeepSpeed's `PipelineEngine`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from zeroengine.config import BatchSizes
from zeroengine.pipeline.module import PipelineModule


class PipelineScriptMethods:
    """Methods of `PipelineEngine` that scripts expect."""

    module: PipelineModule
    batch: BatchSizes
    _batch_function: Callable[[Any], Any] | None
    _given_data: Iterator[Any] | None

    def is_first_stage(self) -> bool:
        """This rank reads the data."""
        return self.module.stage_rank == self.module.placement[0]

    def is_last_stage(self) -> bool:
        """This rank computes the loss."""
        return self.module.stage_rank == self.module.placement[-1]

    @property
    def stage_id(self) -> int:
        """This rank's number along the pipeline."""
        return self.module.stage_rank

    def get_pipeline_parallel_rank(self) -> int:
        return self.module.stage_rank

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.batch.accumulation

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """What `train_batch()` reads from; None: the engine's own loader."""
        self._given_data = iterator

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """What `train_batch()` reads from, once through."""
        self._given_data = iter(loader)

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """`fn` makes (inputs, labels) of each batch that is read."""
        self._batch_function = fn
