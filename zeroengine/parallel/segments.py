"""Runs of layers on a sequence that a tensor group has split between its regions (Megatron-SP)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from zeroengine.errors import ModelError
from zeroengine.parallel.random_regions import RandomRegion
from zeroengine.parallel.tensor_ops import Region
from zeroengine.zero.hooks import in_backward


@dataclass(frozen=True)
class Segment:
    """Layers one after the other that see this rank's tokens only.

    `splits`: the first one's input is the whole sequence, else it comes in parts from the stage before; `end`: the layer whose
    output leaves the run, by default the last one; `joins`: it is made whole there, else it goes on in parts.
    """

    layers: tuple[nn.Module, ...]
    splits: bool = True
    joins: bool = True
    end: nn.Module | None = None

    @property
    def last(self) -> nn.Module:
        return self.layers[-1] if self.end is None else self.end

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for i, layer in enumerate((*self.layers, self.last)):
            for name, p in layer.named_parameters():
                if id(p) not in seen:
                    seen.add(id(p))
                    yield f"{i}.{name}", p


class SplitSequence:
    """The hooks that split a sequence, make it whole where a region begins, and join it."""

    def __init__(self, region: Region, random: RandomRegion, model: nn.Module) -> None:
        self._region, self._random, self._model = region, random, model

    def install(self, segments: Sequence[Segment], readers: Mapping[str, nn.Module]) -> list[Any]:
        """`readers`: the modules around column-parallel layers, by name. Returns the handles that undo it."""
        handles: list[Any] = []
        for name, module in readers.items():
            # the module above reads the number of tokens from its input, before its layers see it
            enter = partial(self._region.enter, subject=name)
            handles.append(module.register_forward_pre_hook(_on_hidden_states(enter), with_kwargs=True))
        for segment in segments:
            first, last = segment.layers[0], segment.last
            handles.append(first.register_forward_pre_hook(_on_hidden_states(self._opening(segment)), with_kwargs=True))
            handles.append(last.register_forward_hook(self._closing(segment)))
            handles.append(first.register_forward_hook(self._after_recomputation, always_call=True))
        return handles

    def _opening(self, segment: Segment) -> Callable[[Tensor], Tensor]:
        def opening(x: Tensor) -> Tensor:
            self._random.enter(self._model.training)
            return self._region.split(x, "first block") if segment.splits else x

        return opening

    def _closing(self, segment: Segment) -> Callable[..., Any]:
        def closing(_: nn.Module, args: Any, out: Any) -> Any:
            self._random.leave()
            if not segment.joins:
                return out
            if isinstance(out, tuple):
                return (self._region.join(out[0], "last block"), *out[1:])
            return self._region.join(out, "last norm")

        return closing

    def _after_recomputation(self, module: nn.Module, args: Any, out: Any) -> None:
        """A first block that is computed again in backward has drawn from this rank's stream, and the end of the run does not
        come. Recomputation leaves the block by an exception once it has what it needs."""
        if in_backward():
            self._random.leave()


def whole_model(model: nn.Module) -> tuple[Segment, ...]:
    """The one segment of a model that is not cut: from the first block to the layer behind which no token is treated by itself
    any more, the last norm, or the last block where there is none (norms behind each layer, as in BERT)."""
    blocks, end = blocks_and_end(model)
    return (Segment(tuple(blocks), end=end),)


def blocks_and_end(model: nn.Module) -> tuple[nn.ModuleList, nn.Module]:
    """The list of blocks and the last norm behind it, or the last block where there is none. Raises `ModelError` where there
    are several lists, or none."""
    found: list[tuple[nn.ModuleList, nn.Module]] = []
    for module in model.modules():
        blocks = [c for c in module.children() if isinstance(c, nn.ModuleList) and len(c)]
        norms = [c for n, c in module.named_children() if n in ("norm", "ln_f", "final_layernorm", "final_layer_norm")]
        if len(blocks) == 1 and len(norms) <= 1:
            found.append((blocks[0], norms[0] if norms else blocks[0][-1]))
    inner = {id(m) for blocks, _ in found for block in blocks for m in block.modules()}
    found = [(blocks, end) for blocks, end in found if id(blocks) not in inner]
    if len(found) == 1:
        return found[0]
    raise ModelError(
        f"tensor_parallel.sequence_parallel: {len(found) or 'no'} lists of blocks were found where there must be one; set it to false"
    )


def _on_hidden_states(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A pre-hook that changes the first argument, or `hidden_states`."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(given, Tensor) or given.dim() < 3:
            shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise ModelError(
                f"tensor_parallel.sequence_parallel: {type(module).__name__} was called with {shape} where hidden states [batch, "
                "tokens, width] are split along the tokens; set it to false"
            )
        if args:
            return (change(given), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(given)}

    return before
