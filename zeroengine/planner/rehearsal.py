"""One micro-batch of every stage on fake tensors: activations, FLOPs, and what is sent inside layers and between stages.

A stage is rehearsed with one block of each kind, and again with two of a kind; the difference is what a block of that kind
takes. In the same way one and two samples give what a sample takes. So a model of any depth costs a few small runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from zeroengine.errors import ModelError, ZeroEngineError
from zeroengine.parallel.stages import StageSharing
from zeroengine.pipeline.causal_lm import PipelinedCausalLM, block_list
from zeroengine.pipeline.module import PipelineModule
from zeroengine.pipeline.stage import as_input, leaves_with_grad
from zeroengine.pipeline.wire import MESSAGE_TRAILER, layout_of
from zeroengine.planner.known import KnownIntegers
from zeroengine.planner.model import ModelSource
from zeroengine.planner.passes import Pass, count_pass
from zeroengine.planner.stage import PaperRank, even_routes


@dataclass(frozen=True)
class StagePass:
    """A micro-batch in one stage. `forward_bytes`, `backward_bytes`: the messages to the next and to the previous stage."""

    stage: int
    counted: Pass
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0

    def plus(self, other: StagePass, times: float) -> StagePass:
        return StagePass(
            self.stage, self.counted.plus(other.counted, times), self.forward_bytes + times * other.forward_bytes,
            self.backward_bytes + times * other.backward_bytes,
        )  # fmt: skip


@dataclass(frozen=True)
class Chain:
    """A micro-batch through all stages. Bytes: `inputs` of the micro-batch, `labels` that go from the first stage to the last."""

    passes: list[StagePass]
    inputs: float = 0.0
    labels: float = 0.0

    def plus(self, other: Chain, times: float) -> Chain:
        passes = [a.plus(b, times) for a, b in zip(self.passes, other.passes, strict=True)]
        return Chain(passes, self.inputs + times * other.inputs, self.labels + times * other.labels)


def rehearse(ranks: list[PaperRank], source: ModelSource, micro: int, sequence: int) -> Chain:
    """Of all stages that `ranks` hold, in order, for micro-batches of `micro` sequences. Raises `ModelError` for a model that cannot be
    run without values."""
    try:
        with KnownIntegers():
            one = _chain(ranks, source, 1, sequence)
            if micro == 1:
                return one
            two = _chain(ranks, source, 2, sequence)
    except ZeroEngineError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelError(f"{source.name} looks at values of its tensors ({error}), and a plan has none") from error
    except Exception as error:  # a forward may raise anything
        raise ModelError(f"{source.name} cannot be rehearsed on {sequence} tokens: {type(error).__name__}: {error}") from error
    return one.plus(two.plus(one, -1.0), float(micro - 1))


def _chain(ranks: list[PaperRank], source: ModelSource, batch: int, sequence: int) -> Chain:
    by_stage = {s: r for r in ranks for s in _stages_of(r)}
    with source.fake:
        given = source.inputs(batch, sequence)
    size = float(sum(t.nbytes for t in given.values()))
    for rank in ranks:
        even_routes(rank.module)
    first = by_stage[0]
    if not isinstance(first.module, PipelineModule):
        return Chain([StagePass(0, _whole(first, source, given))], size)
    with source.fake:
        tree, labels = first.module.split_batch(given if len(given) != 2 or "input_ids" in given else tuple(given.values()))
        if first.sharing is not None:
            tree, labels = first.sharing.begin(0, tree, labels)
    found: list[StagePass] = []
    known: dict[Any, tuple[Pass, Any]] = {}
    for s in range(len(first.module.placement)):
        if s in by_stage:
            counted, output = _one_stage(by_stage[s], source, s, tree, labels, known)
        else:  # of a rank that was left out: as the stage before it
            counted, output = found[-1].counted, tree
        forward = 0.0 if output is None else float(layout_of(output)[0].numel + MESSAGE_TRAILER)
        backward = float(layout_of(leaves_with_grad(tree))[0].numel + MESSAGE_TRAILER) if s else 0.0
        found.append(StagePass(s, counted, forward, backward))
        tree = output
    return Chain(found, size, float(layout_of(labels)[0].numel + MESSAGE_TRAILER))


def _stages_of(rank: PaperRank) -> tuple[int, ...]:
    return rank.module.local_stages if isinstance(rank.module, PipelineModule) else (0,)


def _whole(rank: PaperRank, source: ModelSource, given: dict[str, Tensor]) -> Pass:
    """A model that is not cut."""
    model = rank.module

    def run() -> Iterable[Tensor]:
        arguments = {**given, **({"use_cache": False} if hasattr(model, "config") else {})}
        output = model(**arguments) if rank.sequences is None else rank.sequences.rehearse(model, arguments)
        return [loss_of(output)]

    with source.fake:
        return _over_blocks(_blocks(model), lambda: count_pass(run, model.parameters(), given.values(), rank.fabric))


def _one_stage(
    rank: PaperRank, source: ModelSource, stage: int, tree: Any, labels: Any, known: dict[Any, tuple[Pass, Any]]
) -> tuple[Pass, Any]:
    """The pass of a stage and its output for the next one (None for the last). Stages of the same blocks in the middle of the
    model are rehearsed once."""
    module = rank.module
    if not isinstance(module, PipelineModule):
        raise ModelError("a rank of a pipeline holds a PipelineModule")
    last = stage == len(module.placement) - 1
    owner: nn.Module = module
    blocks: _Blocks | None = None
    if isinstance(module, PipelinedCausalLM):
        owner = module.skeleton(stage)
        blocks = _blocks(owner)
    key = None if stage == 0 or last or blocks is None else tuple(_kind(b) for b in blocks.real)
    if key is not None and key in known:
        return known[key]
    outputs: list[Any] = []

    sharing = rank.sharing if rank.sharing is not None else StageSharing()

    def run() -> Iterable[Tensor]:
        """As the engine runs a stage."""
        arrived = sharing.unpack(0, as_input(tree)) if stage else tree
        sharing.use(0)
        module.split_tokens = sharing.length() if stage else 0
        output = module(arrived, stage, 0)
        if last:
            return [module.loss(output, labels)]
        packed = sharing.pack(0, output)
        outputs[:] = [as_input(packed)]
        return leaves_with_grad(packed)

    params = [p for n, p in module.named_parameters() if _belongs(module, n, stage)]
    known_tensors = [t for t in tree_leaves((tree, labels)) if isinstance(t, Tensor)]
    with source.fake:
        counted = _over_blocks(blocks, lambda: count_pass(run, params, known_tensors, rank.fabric))
    result = counted, None if last else outputs[0]
    if key is not None:
        known[key] = result
    return result


def _belongs(module: PipelineModule, name: str, stage: int) -> bool:
    part = module.part_of(name)
    return part == f"stage {stage}" or part.startswith("tied.")


@dataclass
class _Blocks:
    """The list of blocks of a model. `real`: those that are not of another stage."""

    owner: nn.Module
    name: str
    every: nn.ModuleList
    real: list[nn.Module]

    @contextlib.contextmanager
    def only(self, chosen: list[nn.Module]) -> Iterator[None]:
        every = list(self.every)
        start, end = every.index(self.real[0]), every.index(self.real[-1]) + 1
        # what stands at the borders of a stage passes hidden states in and out
        self.owner._modules[self.name] = nn.ModuleList([*every[max(start - 1, 0) : start], *chosen, *every[end : end + 1]])
        try:
            yield
        finally:
            self.owner._modules[self.name] = self.every


def _blocks(model: nn.Module) -> _Blocks | None:
    try:
        path, every = block_list(model)
    except ModelError:
        return None
    parent, _, name = path.rpartition(".")
    real = [b for b in every if any(True for _ in b.parameters())]
    return _Blocks(model.get_submodule(parent), name, every, real)


def _kind(block: nn.Module) -> tuple[Any, ...]:
    shapes = tuple((n, tuple(p.shape)) for n, p in block.named_parameters())
    return type(block).__name__, getattr(block, "attention_type", None), shapes


def _over_blocks(blocks: _Blocks | None, count: Callable[[], Pass]) -> Pass:
    """The pass over all blocks from runs over one or two of each kind."""
    if blocks is None or len(blocks.real) < 2:
        return count()
    kinds: dict[tuple[Any, ...], list[nn.Module]] = {}
    for block in blocks.real:
        kinds.setdefault(_kind(block), []).append(block)
    with blocks.only([found[0] for found in kinds.values()]):
        base = count()
    total = base
    for kind, found in kinds.items():
        if len(found) > 1:
            with blocks.only([b for k, each in kinds.items() for b in each[: 2 if k == kind else 1]]):
                total = total.plus(count().minus(base), float(len(found) - 1))
    return total


def loss_of(output: Any) -> Tensor:
    """What backward starts from: a tensor, or the `loss` of a mapping or an object."""
    found = output if isinstance(output, Tensor) else output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ModelError(f"the model's forward gives {type(output).__name__} without a scalar loss; a plan needs it to go backward")
    return found
