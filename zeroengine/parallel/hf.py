"""A Hugging Face model whose ranks share each sequence: batches cut, positions and documents derived, loss averaged."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroengine.comm.protocol import Communicator
from zeroengine.errors import ConfigError, ModelError
from zeroengine.parallel.group import SequenceGroup
from zeroengine.parallel.hf_attention import NAMES, RunningBatch, SequenceLink, connect, disconnect, register
from zeroengine.parallel.layout import SequenceLayout
from zeroengine.parallel.loss import IGNORED, mean_over_ranks, next_token_targets, token_sum
from zeroengine.parallel.masks import documents_from_positions
from zeroengine.parallel.same import check_same_batch
from zeroengine.zero.hooks import ModuleHook, recomputes


def is_transformers_model(model: nn.Module) -> bool:
    """Whether attention functions can be put into `model`."""
    return callable(getattr(model, "set_attn_implementation", None)) and hasattr(model, "config")


def built_with(model: nn.Module) -> str | None:
    """The zero_* attention that the model was built with, if any."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return name if name in NAMES else None


class GroupSequences:
    """Sequences that the ranks of `group` share."""

    group: SequenceGroup

    def layout(self, length: int) -> SequenceLayout:
        """Where the tokens of sequences of `length` lie; its `shard` and `unshard` cut and join tensors."""
        return self.group.layout(length)


class SequenceAttention(GroupSequences):
    """The attention of a transformers model (or of stages of one), exchanged for one over the ranks of `group`."""

    def __init__(self, model: nn.Module, group: SequenceGroup, attention: str) -> None:
        self.group = group
        self.link = SequenceLink(group)
        register()
        before: Any = model.config._attn_implementation  # type: ignore[union-attr]
        self.own: str = before if before not in NAMES else "sdpa"  # what the model uses by itself
        model.set_attn_implementation(attention)  # type: ignore[operator]
        if model.config._attn_implementation != attention:  # type: ignore[union-attr]
            raise ModelError(
                f'{type(model).__name__} computes attention by itself and does not take attn_implementation "{attention}"; set mesh.cp to 1'
            )
        connect(model, self.link)

    def remove(self, model: nn.Module) -> None:
        """Gives the model its own attention back."""
        disconnect(model)
        model.set_attn_implementation(self.own)  # type: ignore[operator]


class SharedSequences(SequenceAttention):
    """Runs a transformers model on this rank's tokens of the batches it is given whole.

    The batch is checked to be the same on the ranks of the group, padded, and cut; position ids and the borders of packed
    documents (position ids that start again, zeros of a 2-D attention mask) are derived before the cut. With labels the
    output's `loss` is the mean over valid tokens of all data ranks, the same number on each; its logits are this rank's.
    With `num_items_in_batch`, which transformers' Trainer gives, it is this rank's part of the sum divided by that number.

    In evaluation mode a call of the module itself (`generate`) runs whole sequences on each rank by itself, and so does
    the engine's with `alone_in_eval`.
    """

    def __init__(
        self, model: nn.Module, group: SequenceGroup, attention: str, same: Communicator, ranks: Communicator,
        factor: float, total: Callable[[Tensor, Tensor], Tensor] = token_sum, alone_in_eval: bool = False,
    ) -> None:  # fmt: skip
        """`same`: control over the ranks that get one batch; `ranks`: control over all among which gradients are reduced;
        `factor`: what that reduction divides by; `total`: summed loss of logits and targets."""
        super().__init__(model, group, attention)
        self._same, self._ranks, self._factor, self._total = same, ranks, factor, total
        self._alone_in_eval = alone_in_eval
        self._open: list[weakref.ref[Tensor]] = []  # outputs of a forward whose layers run again in backward
        self._accepted = accepted_names(model)
        self._causal_targets = predicts_next(model)
        self.router_loss = False  # the model's own is made that of the whole batch
        self._outside = OutsideCalls(model, self.link, self.own, attention)

    def remove(self, model: nn.Module) -> None:
        self._outside.remove()
        super().remove(model)

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's forward. Collective."""
        if self._alone_in_eval and not model.training:
            return model(*args, **kwargs)
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        inputs = dict(bound.arguments)
        inputs.update(inputs.pop("kwargs", {}))
        return self._call(model, inputs)

    def _call(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        check_same_batch({k: v for k, v in inputs.items() if v is not None}, self._same)
        items = inputs.pop("num_items_in_batch", None)
        return self._run(model, inputs, self._mean if items is None else lambda total, targets: total / items)

    def rehearse(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """The forward on tensors without values, one document each; its loss is not averaged over ranks."""
        return self._run(model, dict(inputs), lambda total, targets: total)

    def _mean(self, total: Tensor, targets: Tensor) -> Tensor:
        return mean_over_ranks(total, (targets != IGNORED).sum(), self._ranks, self._factor)

    def _run(self, model: nn.Module, inputs: dict[str, Any], mean: Callable[[Tensor, Tensor], Tensor]) -> Any:
        labels, shifted = inputs.pop("labels", None), inputs.pop("shift_labels", None)
        local, running = cut_batch(inputs, self.group, self._accepted)
        targets = shifted if shifted is not None else self._targets(labels)
        output = self._attend(model, local, running)
        if targets is not None:
            output = self._with_loss(model, output, running.layout.shard(targets, self.group.rank, fill=IGNORED), mean)
        self._note_open(model, output)
        return output

    def _attend(self, model: nn.Module, local: Mapping[str, Any], running: RunningBatch) -> Any:
        """The forward on this rank's tokens of the batch `running`."""
        self._check_open(running)
        self.link.batch = running
        before = self.link.calls
        self.link.running = True
        try:
            output = model(**local)
        finally:
            self.link.running = False
        if self.link.calls == before:
            raise ModelError(
                f"{type(model).__name__} did not call the attention over a shared sequence: its layers would see one slice each; "
                "set mesh.cp to 1"
            )
        return output

    def _note_open(self, model: nn.Module, output: Any) -> None:
        """Remembers that the layers behind `output` run again in its backward, if they do."""
        if not model.training or not recomputes(model):
            return
        found = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        for t in found:
            t.register_hook(self._close)
        self._open = [weakref.ref(t) for t in found]

    def _close(self, grad: Tensor) -> None:
        self._open = []

    def _check_open(self, running: RunningBatch) -> None:
        """Layers that are computed again in backward take the layout of the last batch."""
        alive = any(ref() is not None for ref in self._open)
        if not alive or self.link.batch is None or self.link.batch.same_as(running):
            return
        raise ModelError(
            "a second batch of another length or with other documents came before the backward of the first, and with gradient "
            "checkpointing the layers of the first are computed again there; call backward after each forward"
        )

    def _targets(self, labels: Tensor | None) -> Tensor | None:
        if labels is None:
            return None
        return next_token_targets(labels) if self._causal_targets else labels

    def _with_loss(self, model: nn.Module, output: Any, targets: Tensor, mean: Callable[[Tensor, Tensor], Tensor]) -> Any:
        logits = output["logits"] if isinstance(output, Mapping) else getattr(output, "logits", None)
        if logits is None or logits.dim() != 3:
            raise ModelError("labels were given, but the model returns no logits [batch, tokens, classes] to compare them with")
        router = getattr(output, "aux_loss", None)
        if router is not None and not self.router_loss:
            raise ModelError("the model adds a router loss of its own, which depends on whole sequences; set output_router_logits=False")
        loss = mean(self._total(logits, targets), targets)
        output["loss"] = loss if router is None else loss + model.router_aux_loss_coef * router
        return output


class OutsideCalls:
    """Lets a model whose attention was exchanged run by itself in evaluation mode, outside the engine's forward: with its own
    attention, which is put in place while the outermost transformers model inside it runs."""

    def __init__(self, model: nn.Module, link: SequenceLink, own: str, shared: str) -> None:
        self._model, self._link, self._own, self._shared = model, link, own, shared
        self._depth = 0
        enter, leave = ModuleHook(self._enter), ModuleHook(self._leave)
        self._handles = []
        for module in model.modules():
            if is_transformers_model(module):
                self._handles.append(module.register_forward_pre_hook(enter))
                self._handles.append(module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if not (module.training or self._link.running):
            self._depth += 1
            if self._depth == 1:
                self._model.set_attn_implementation(self._own)  # type: ignore[operator]

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self._depth and not (module.training or self._link.running):
            self._depth -= 1
            if self._depth == 0:
                self._model.set_attn_implementation(self._shared)  # type: ignore[operator]


def accepted_names(model: nn.Module) -> frozenset[str]:
    """Names that the forward of `model` takes; of an adapter around a model, also those that it hands through."""
    adapter: Any = model
    inner = adapter.get_base_model() if callable(getattr(model, "get_base_model", None)) else model
    return frozenset(inspect.signature(model.forward).parameters) | frozenset(inspect.signature(inner.forward).parameters)


def cut_batch(inputs: Mapping[str, Any], group: SequenceGroup, accepted: frozenset[str]) -> tuple[dict[str, Any], RunningBatch]:
    """This rank's tokens of the arguments of a transformers model without its labels, and where all tokens lie. `accepted`: names
    that the model's forward takes. Position ids and documents are derived from the whole batch."""
    given = dict(inputs)
    batch, length = batch_shape(given)
    running = RunningBatch(group.layout(length), _documents(given, batch, length))
    given.pop("attention_mask", None)
    leave_out_cache(given, accepted)
    if "position_ids" in accepted and given.get("position_ids") is None:
        device = next(v.device for v in given.values() if isinstance(v, Tensor))
        given["position_ids"] = torch.arange(length, device=device)[None].expand(batch, -1)
    return {name: cut_tokens(name, value, running.layout, group.rank, batch) for name, value in given.items()}, running


def cut_tokens(name: str, value: Any, layout: SequenceLayout, rank: int, batch: int) -> Any:
    """The tokens of `rank` of a tensor [batch, tokens, ...]; other values as they are."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.dim() < 2 or value.shape[0] not in (1, batch) or value.shape[1] != layout.length:
        raise ConfigError(
            f"'{name}' has shape {tuple(value.shape)}, not [{batch}, {layout.length}, ...]: it cannot be cut along the "
            "sequence; set mesh.cp to 1"
        )
    return layout.shard(value, rank)


def leave_out_cache(inputs: dict[str, Any], accepted: frozenset[str]) -> None:
    """Makes a model that is called with `inputs` keep no keys and values for later tokens. Raises `ConfigError` if some are given."""
    if inputs.pop("past_key_values", None) is not None:
        raise ConfigError("a cache cannot run over a shared sequence; leave past_key_values out")
    if "use_cache" in accepted:
        inputs["use_cache"] = False


def predicts_next(model: nn.Module) -> bool:
    """Labels are shifted in causal language models, and compared in place in all others."""
    kind = getattr(model, "loss_type", None) or type(model).__name__
    return "CausalLM" in kind or "LMHeadModel" in type(model).__name__


def batch_shape(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Sequences and tokens of each in the inputs of a model. Raises `ConfigError` for inputs that tell neither."""
    for name in ("input_ids", "inputs_embeds"):
        value = inputs.get(name)
        if isinstance(value, Tensor):
            return value.shape[0], value.shape[1]
    raise ConfigError("a model over a shared sequence must be called with input_ids or inputs_embeds")


def _documents(inputs: Mapping[str, Any], batch: int, length: int) -> Tensor | None:
    """Document numbers [B, length] on the host, -1 for padding; None for one document without padding."""
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != (batch, length)):
        raise ConfigError(
            f"attention_mask must be [{batch}, {length}] with mesh.cp > 1; it was {getattr(mask, 'shape', type(mask).__name__)}"
        )
    if mask is None and positions is None:
        return None
    documents = torch.zeros(1, length, dtype=torch.int64)
    if positions is not None:
        documents = documents_from_positions(positions.detach().cpu().reshape(-1, length))
    if mask is not None:
        documents = documents.expand(batch, length).masked_fill(mask.detach().cpu() == 0, -1)
    return documents if bool((documents != 0).any()) else None
