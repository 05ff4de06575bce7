"""The stages of a transformers model: its own forward, in which the blocks of other stages return what they get.

The block in front of a stage's own brings in the hidden states that have arrived, and the one behind takes them out: what the model
computes before its blocks and after them (it scales embeddings, adds positions, caps logits) is computed of zeros and dropped,
but for the first and the last stage.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from zeroengine.errors import ModelError
from zeroengine.zero.modes import Modes


class _PassBlock(nn.Module):
    """A block of another stage: hidden states go through, in the form in which the model's blocks return them."""

    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self._as_tuple = as_tuple

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states,) if self._as_tuple else hidden_states


def _as_whole(part: Tensor, tokens: int) -> Tensor:
    """Zeros without memory in the shape of hidden states [batch, tokens, width] of which `part` is a part."""
    return part.new_zeros(()).expand(part.shape[0], tokens, *part.shape[2:])


class _BorderBlock(_PassBlock):
    """The block before, or behind, a stage's own: it puts the stage's hidden states, `part`, into the place of zeros, or takes them
    out. The zeros stand for the whole sequence of `tokens`, where it is split, since the model reads shapes from them."""

    def __init__(self, as_tuple: bool, arrives: bool) -> None:
        super().__init__(as_tuple)
        self._arrives = arrives
        self.tokens = 0  # 0: as many as there are
        self.part: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._arrives:
            return super().forward(self.take())
        self.part = hidden_states
        return super().forward(_as_whole(hidden_states, self.tokens or hidden_states.shape[1]))

    def take(self) -> Tensor:
        part, self.part = self.part, None
        if part is None:
            raise ModelError("the model did not call its list of blocks once each; write it as a PipelineModule of layers")
        return part


class _PassHead(nn.Module):
    """A norm, projection or head of another stage: zeros go through."""

    weight = torch.empty(0)  # whose type some models ask for

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        return next((x for x in given if x.is_floating_point()), given[0] if given else None)


class _Nothing(nn.Module):
    """A table of positions of another stage: nothing is added to the zeros."""

    weight = torch.empty(0)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        device = next((x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        return torch.zeros((), device=device)  # without dimensions: it does not change the type it is added to


class Skeleton:
    """The model's own forward over the blocks of one stage. Shares its parts with the model it was made from."""

    def __init__(self, model: nn.Module, path: str, start: int, end: int, trial: Trial) -> None:
        self.first, self.last = start == 0, end == len(trial.blocks)
        self.blocks = tuple(trial.blocks[start:end])
        self._before = _BorderBlock(trial.blocks_return_tuples, arrives=True)
        self._behind = _BorderBlock(trial.blocks_return_tuples, arrives=False)
        self.module = parent = _clone(model)
        *way, name = path.split(".")
        for part in way:
            self._leave_out(parent, part, trial)
            parent._modules[part] = _clone(parent._modules[part])
            parent = parent._modules[part]
        self._leave_out(parent, name, trial)
        passing = _PassBlock(trial.blocks_return_tuples)
        blocks = [b if start <= i < end else passing for i, b in enumerate(trial.blocks)]
        if not self.first:
            blocks[start - 1] = self._before
        if not self.last:
            blocks[end] = self._behind
        parent._modules[name] = nn.ModuleList(blocks)

    def _leave_out(self, holder: nn.Module, way: str, trial: Trial) -> None:
        """Takes from a module that leads to the blocks, by `way`, what only the first or the last stage needs beside them."""
        for name, child in list(holder._modules.items()):
            if child is None or name == way:
                continue
            weighs = any(True for _ in child.parameters())
            if child in trial.before:
                if self.first or child in trial.after:
                    continue
                if isinstance(child, nn.Embedding):
                    # token tables are not looked at with inputs_embeds; tables of positions are
                    holder._modules[name] = _Nothing()
                elif weighs or isinstance(child, nn.Dropout):  # a dropout would draw random numbers
                    holder._modules[name] = _PassHead()
            elif not self.last and weighs:  # or that nobody calls
                holder._modules[name] = _PassHead()

    def __call__(self, given: dict[str, Any], tokens: int = 0) -> dict[str, Any]:
        """`given`: arguments of the model's forward. Returns those of the next stage; of the last one, logits in their place.
        `tokens`: of the whole sequence, where hidden states between stages are a part of it; else 0."""
        run = dict(given)
        self._before.tokens = self._behind.tokens = tokens
        if not self.first:
            arrived = self._before.part = given["inputs_embeds"]
            run["inputs_embeds"] = _as_whole(arrived, tokens or arrived.shape[1])
        output = self.module(**run, use_cache=False).logits
        if not self.last:
            output = self._behind.take()
        rest = {k: v for k, v in given.items() if k not in ("input_ids", "inputs_embeds")}
        return {**rest, "inputs_embeds": output}


def _clone(module: Any) -> Any:
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made


class Trial:
    """One small batch through the whole model and through the stages: a model whose forward can not be cut this way (its blocks see
    the embeddings as well, say) is refused instead of trained wrongly."""

    def __init__(self, model: nn.Module, path: str) -> None:
        self.blocks = list(cast(nn.ModuleList, model.get_submodule(path)))
        self._modes = Modes(model)
        self._model = model.eval()
        vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        device = next(model.parameters()).device
        self._ids = torch.arange(8, device="meta" if device.type == "meta" else None).view(2, 4) % vocabulary
        seen: list[Any] = []
        hooks = [self.blocks[0].register_forward_hook(lambda m, a, output: seen.append(output)), *self._watched(path, seen)]
        try:
            with torch.no_grad():
                self._expected = model(input_ids=self._ids, use_cache=False).logits
        except Exception as error:
            raise self._uncut(f"its forward with input_ids only fails ({type(error).__name__}: {error})") from error
        finally:
            for hook in hooks:
                hook.remove()
        if not seen:
            raise self._uncut("it does not call them")
        self.blocks_return_tuples = isinstance(seen[0], tuple)

    def _watched(self, path: str, seen: list[Any]) -> list[Any]:
        """Hooks that notice which modules beside the way to the blocks run `before` the first block ends, and which `after` it."""
        self.before: set[nn.Module] = set()
        self.after: set[nn.Module] = set()

        def ran(module: nn.Module, args: Any, output: Any) -> None:
            (self.after if seen else self.before).add(module)

        holder, hooks = self._model, []
        for part in path.split("."):
            beside = [child for name, child in holder._modules.items() if child is not None and name != part]
            hooks += [child.register_forward_hook(ran) for child in beside]
            holder = cast(nn.Module, holder._modules[part])
        return hooks

    def compare(self, stages: list[Skeleton]) -> None:
        given: dict[str, Any] = {"input_ids": self._ids}
        try:
            with torch.no_grad():
                for stage in stages:
                    given = stage(given)
        except Exception as error:
            raise self._uncut(f"a part of it fails by itself ({type(error).__name__}: {error})") from error
        self._modes.restore()
        got = given["inputs_embeds"]
        known = not (got.is_meta or is_fake(got))  # a plan has shapes only
        if got.shape != self._expected.shape or known and not torch.allclose(got, self._expected, rtol=1e-4, atol=1e-5):
            raise self._uncut("its stages one after the other give another result than the whole model")

    def _uncut(self, reason: str) -> ModelError:
        self._modes.restore()
        return ModelError(
            f"{type(self._model).__name__} can not be cut at its list of blocks: {reason}; write it as a PipelineModule of layers"
        )
