"""Puts tensor parallelism on a model: cuts parameters, and gives layers the operators at the borders of a region.

Parameters stay the same objects with their names; their values become this rank's part (`TensorShard`), which the
mechanism then shards like any parameter. Layers keep their place and their hooks; only their class is exchanged for one
with the border operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroengine.comm.protocol import Communicator
from zeroengine.errors import ConfigError, ModelError
from zeroengine.parallel.random_regions import RandomRegion
from zeroengine.parallel.segments import Segment, SplitSequence, whole_model
from zeroengine.parallel.tensor_ops import Entry, Region
from zeroengine.parallel.tensor_plan import Plan, head_attributes
from zeroengine.parallel.vocabulary import VocabularyLoss, split_lookup
from zeroengine.zero.tensor import TensorShard, mark_tensor_shard, tensor_shard, whole_shape, whole_value


class _Link:
    """What a split layer knows. `entry`: None where the module above it enters the region; `rows`: the part of a whole weight
    that is used here."""

    def __init__(self, name: str, region: Region, entry: Entry | None, random: RandomRegion, transposed: bool) -> None:
        self.name = name
        self.region = region
        self.entry = entry
        self.random = random
        self.transposed = transposed
        self.gathers = False  # outputs are made whole
        self.opens = True  # a row-parallel layer follows
        self.rows: slice | None = None

    def __deepcopy__(self, memo: Any) -> _Link:
        return self  # a copy of the model has the same parts on the same ranks

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.T if self.transposed else weight
        if self.rows is not None:
            weight, bias = weight[self.rows], None if bias is None else bias[self.rows]
        return F.linear(x, weight, bias)


def _column_forward(self: Any, x: Tensor) -> Tensor:
    link: _Link = self._tensor_link
    out = link.linear(x if link.entry is None else link.entry(x, link.name), self.weight, self.bias)
    if link.gathers:
        return link.region.gather_last(out, f"{link.name}: outputs")
    if not link.region.splits and link.opens:
        link.random.enter(self.training)
    return out


def _row_forward(self: Any, x: Tensor) -> Tensor:
    link: _Link = self._tensor_link
    if not link.region.splits:
        link.random.leave()
    out = link.region.leave(link.linear(x, self.weight, None), link.name)
    return out if self.bias is None else out + self.bias


class TensorParallel:
    """Tensor parallelism of one model over `comm`. Collective."""

    def __init__(
        self, model: nn.Module, plan: Plan, comm: Communicator, device: torch.device, splits: bool = False,
        splits_loss: bool = False, segments: Sequence[Segment] | None = None, ties: Mapping[str, Sequence[str]] | None = None,
    ) -> None:  # fmt: skip
        """`splits`: sequences are split between the regions as well (Megatron-SP). `splits_loss`: logits stay cut along the
        vocabulary, and the model's loss is computed from the parts.

        Of a stage of a pipeline, `plan` has the names of the whole model; `segments` are the runs of its layers on a split
        sequence, and `ties` says by the name of a tied weight under which names all stages use it."""
        self.plan, self.comm = plan, comm
        self._ties = dict(ties or {})
        self.region = Region(comm, splits)
        self.loss = VocabularyLoss(comm) if splits_loss else None
        self._random = RandomRegion(comm, device)
        self._entries: dict[str, Entry] = {}
        self._handles: list[Any] = []
        self._summed: set[int] = set()
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []
        self._attributes: list[tuple[nn.Module, str, int | None]] = []
        modules, params = dict(model.named_modules()), dict(model.named_parameters())
        if splits and segments is None:
            segments = whole_model(model)
        self._segments = segments or ()
        self._check(modules)
        self._equal(model)
        for name, style in plan.styles.items():
            if name in modules:
                self._module(model, name, modules[name], style)
            elif name in params:
                self._experts_weight(name, params[name], style, modules)
        self._heads(modules)
        if self.loss is not None:
            model.loss_function = self.loss  # type: ignore[assignment]
        if splits:
            self._split_sequence(model, modules)
        self._random.synchronize()

    # --- checks ---------------------------------------------------------------------------------------------------

    def _check(self, modules: dict[str, nn.Module]) -> None:
        """Everything is checked before anything is changed."""
        if not self.plan.styles:
            raise ModelError("the tensor plan matches no layer of the model; set mesh.tp to 1")
        size = self.comm.size
        if self.loss is not None:
            self._check_head(modules)
        for name, style in self.plan.styles.items():
            module = modules.get(name)
            if self.region.splits and style in ("experts", "packed"):
                raise ModelError(f"'{name}': experts cannot run on a split sequence; set tensor_parallel.sequence_parallel to false")
            if module is None or style not in ("column", "row", "fused"):
                continue
            outer = style != "row"
            weight: nn.Parameter = module.weight  # type: ignore[assignment]
            features = weight.shape[0 if outer != _transposed(module) else 1]
            if features % size and not self._few_key_heads(modules, name):
                side = "output" if outer else "input"
                raise ConfigError(f"mesh.tp {size} does not divide the {features} {side} features of '{name}'; give a divisor")
        if self.region.splits:
            blocks = [layer for segment in self._segments for layer in segment.layers]
            for name, style in self.plan.styles.items():
                if style in ("column", "fused") and any(modules.get(name.rpartition(".")[0]) is b for b in blocks):
                    raise ModelError(
                        f"tensor_parallel.sequence_parallel: '{name}' lies directly in its block, whose norms would see the "
                        "whole sequence; set it to false"
                    )
            self._check_attentions(modules, blocks)
        for name in self._attentions(modules):
            for attribute, heads in head_attributes(modules[name]):
                if heads % size and size % heads:
                    raise ConfigError(
                        f"mesh.tp {size} and the {heads} heads of '{name}' ({attribute}) do not divide one another; give another degree"
                    )

    def _check_attentions(self, modules: dict[str, nn.Module], blocks: Sequence[nn.Module]) -> None:
        """On a split sequence an attention that the plan leaves whole would see this rank's tokens only."""
        readers = {id(modules.get(n.rpartition(".")[0])) for n, s in self.plan.styles.items() if s in ("column", "fused")}
        names = {id(m): n for n, m in modules.items()}
        for block in blocks:
            around = {id(m) for m in block.modules() if any(id(inner) in readers for inner in m.modules())}
            inside = {id(inner) for m in block.modules() if id(m) in readers for inner in m.modules()}
            for m in block.modules():
                if "attention" in type(m).__name__.lower() and id(m) not in around | inside and any(True for _ in m.parameters()):
                    raise ModelError(
                        f"tensor_parallel.sequence_parallel: the plan ({self.plan.origin}) does not split the attention "
                        f"'{names.get(id(m), type(m).__name__)}', which would see a part of each sequence only; set it to false"
                    )

    def _check_head(self, modules: dict[str, nn.Module]) -> None:
        """The loss of parts needs a head of parts, and a model that lets its loss be exchanged."""
        model = modules[""]
        heads = [n for n, s in self.plan.styles.items() if s == "column_gather"]
        if len(heads) == 1 and heads[0] not in modules:  # of another stage, which checks it
            return
        why = ""
        if not hasattr(model, "loss_function"):
            why = f"{type(model).__name__} has no loss_function that could be exchanged"
        elif len(heads) != 1:
            why = f"the plan splits {len(heads) or 'no'} layers along the vocabulary"
        elif _rows(modules[heads[0]]) % self.comm.size:
            why = f"mesh.tp {self.comm.size} does not divide the {_rows(modules[heads[0]])} outputs of '{heads[0]}'"
        elif self._tied_elsewhere(model, modules[heads[0]]):
            why = f"the weight of '{heads[0]}' is also that of a layer that is not split along the vocabulary"
        if why:
            raise ConfigError(f"tensor_parallel.loss_parallel: {why}; set it to false")

    def _attentions(self, modules: dict[str, nn.Module]) -> list[str]:
        parents = {n.rpartition(".")[0] for n, s in self.plan.styles.items() if s in ("column", "fused") and n in modules}
        return sorted(n for n in parents if any(True for _ in head_attributes(modules[n])) or hasattr(modules[n], "head_dim"))

    def _key_heads(self, modules: dict[str, nn.Module], name: str) -> tuple[int, int] | None:
        """(query heads, key heads) of the attention that the key or value projection `name` belongs to."""
        parent, _, own = name.rpartition(".")
        if own not in ("k_proj", "v_proj"):
            return None
        module = modules[parent]
        config = getattr(module, "config", None)
        heads = getattr(module, "num_heads", None) or getattr(config, "num_attention_heads", None)
        keys = getattr(module, "num_key_value_heads", None) or getattr(config, "num_key_value_heads", None)
        return (heads, keys) if isinstance(heads, int) and isinstance(keys, int) else None

    def _few_key_heads(self, modules: dict[str, nn.Module], name: str) -> bool:
        found = self._key_heads(modules, name)
        return found is not None and found[1] < self.comm.size

    def _equal(self, model: nn.Module) -> None:
        """Every rank starts from the first one's whole values, so that they do not depend on the degree."""
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.numel():
                values = tensor.detach().contiguous()
                self.comm.broadcast(values.view(-1), 0, name).wait()
                tensor.data.copy_(values)

    # --- layers ---------------------------------------------------------------------------------------------------

    def _module(self, model: nn.Module, name: str, module: nn.Module, style: str) -> None:
        if style in ("column", "column_gather", "fused", "row"):
            self._linear(model, name, module, style)
        elif style == "vocabulary":
            if not self._tied_elsewhere(model, module) and not _rows(module) % self.comm.size:
                self._vocabulary(name, module)
        elif style == "partial":
            for p in module.parameters():
                self._sum_gradient(f"{name}.weight", p)
        elif style == "experts":
            self._expert_borders(name, module)

    def _linear(self, model: nn.Module, name: str, module: nn.Module, style: str) -> None:
        weight: nn.Parameter = module.weight  # type: ignore[assignment]
        bias: nn.Parameter | None = module.bias  # type: ignore[assignment]
        transposed, size, rank = _transposed(module), self.comm.size, self.comm.rank
        outer = style != "row"
        dim = 0 if outer != transposed else 1
        if style == "column_gather" and (whole_shape(weight)[dim] % size or self._tied_elsewhere(model, module)):
            return  # stays whole and equal on every rank
        parent = name.rpartition(".")[0]
        entry = None if self.region.splits else self._entries.setdefault(parent, Entry(self.region))
        if style == "column_gather":
            entry = Entry(Region(self.comm))  # behind the last norm the sequence is whole
        link = _Link(name, self.region, entry, self._random, transposed)
        link.gathers = style == "column_gather" and self.loss is None
        link.opens = style != "column_gather"
        found = self._key_heads(dict(model.named_modules()), name) if outer else None
        if found is not None and found[1] < size:
            keys = found[1]
            if size % keys or found[0] % size:
                raise ConfigError(
                    f"mesh.tp {size}: '{name}' has {keys} key heads for {found[0]} query heads; the degree must be a "
                    "multiple of the first and divide the second"
                )
            width = weight.shape[dim] // keys
            link.rows = slice(rank * keys // size * width, (rank * keys // size + 1) * width)
            for p in (weight, bias):
                if p is not None:
                    self._sum_gradient(name, p)
        else:
            sections = 3 if style == "fused" else 1
            _cut(weight, TensorShard.over(self.comm, dim, sections))
            if bias is not None and outer:
                _cut(bias, TensorShard.over(self.comm, 0, sections))
            elif bias is not None and self.region.splits:
                self._sum_gradient(f"{name}.bias", bias)
        module._tensor_link = link  # type: ignore[assignment]
        base = type(module)
        self._classes.append((module, base))
        forward = _column_forward if outer else _row_forward
        module.__class__ = type(f"{'Column' if outer else 'Row'}{base.__name__}", (base,), {"forward": forward})

    def _tied_elsewhere(self, model: nn.Module, module: nn.Module) -> bool:
        """The weight is shared with a layer that the plan does not split in the same way."""
        names = [n for n, p in model.named_parameters(remove_duplicate=False) if p is module.weight]
        names = next((list(self._ties[n]) for n in names if n in self._ties), names)
        styles = {self.plan.styles.get(n.rpartition(".")[0]) for n in names}
        return not styles <= {"vocabulary", "column_gather"} or ("vocabulary" in styles and self.region.splits)

    def _vocabulary(self, name: str, module: nn.Module) -> None:
        weight: nn.Parameter = module.weight  # type: ignore[assignment]
        rows = whole_shape(weight)[0] // self.comm.size
        _cut(weight, TensorShard.over(self.comm, 0))
        padding = getattr(module, "padding_idx", None)
        if padding is not None:
            inside = 0 <= padding - self.comm.rank * rows < rows
            self._set(module, "padding_idx", padding - self.comm.rank * rows if inside else None)
        self._handles += split_lookup(name, module, self.comm, rows)

    def _expert_borders(self, name: str, module: nn.Module) -> None:
        def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            # routing weights scale partial outputs, so their gradients are partial, too
            return tuple(self.region.enter(a, name) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)

        def after(_: nn.Module, args: Any, out: Tensor) -> Tensor:
            return self.region.leave(out, name)

        self._handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def _experts_weight(self, name: str, param: nn.Parameter, style: str, modules: Mapping[str, nn.Module]) -> None:
        """Weights of all experts in one tensor [experts, out, in], or biases [experts, out]."""
        if style == "once":
            self._set(modules[name.rpartition(".")[0]], "adds_bias", self.comm.rank == 0)
            return
        dim, sections = {"packed": (1, 2), "column": (1, 1), "row": (2, 1)}[style]
        if param.shape[dim] % (sections * self.comm.size):
            raise ConfigError(f"mesh.tp {self.comm.size} does not divide dimension {dim} of '{name}', {tuple(param.shape)}; give a divisor")
        _cut(param, TensorShard.over(self.comm, dim, sections))

    def _sum_gradient(self, name: str, param: nn.Parameter) -> None:
        """For a parameter that is whole on every rank, but used on a part of its inputs or outputs."""

        def summed(grad: Tensor) -> Tensor:
            out = grad.contiguous().clone()
            self.comm.all_reduce(out, f"gradient of '{name}'").wait()
            return out

        if param.requires_grad and id(param) not in self._summed:  # a norm of heads between split layers is met twice
            self._summed.add(id(param))
            self._handles.append(param.register_hook(summed))

    def _heads(self, modules: dict[str, nn.Module]) -> None:
        """Attention modules count this rank's heads."""
        size = self.comm.size
        for name in self._attentions(modules):
            module = modules[name]
            before = dict(head_attributes(module))
            for attribute, heads in before.items():
                self._set(module, attribute, max(heads // size, 1))
            if isinstance(getattr(module, "split_size", None), int):
                self._set(module, "split_size", int(module.split_size) // size)  # type: ignore[arg-type]
            found = self._key_heads(modules, f"{name}.k_proj")
            if found is None and isinstance(getattr(module, "num_key_value_groups", None), int):
                raise ModelError(f"'{name}' shares key heads, but how many there are is not known; set mesh.tp to 1")
            if found is not None and hasattr(module, "num_key_value_groups"):
                whole = (before.get("num_heads", found[0]), before.get("num_key_value_heads", found[1]))
                self._set(module, "num_key_value_groups", (whole[0] // size) // max(whole[1] // size, 1))

    def _set(self, module: nn.Module, attribute: str, value: int | None) -> None:
        self._attributes.append((module, attribute, getattr(module, attribute)))
        setattr(module, attribute, value)

    def _split_sequence(self, model: nn.Module, modules: dict[str, nn.Module]) -> None:
        """Megatron-SP: the sequence is split from the first block to behind the last norm (see `whole_model`)."""
        readers = sorted({n.rpartition(".")[0] for n, s in self.plan.styles.items() if s in ("column", "fused")} & modules.keys())
        split = SplitSequence(self.region, self._random, model)
        self._handles += split.install(self._segments, {name: modules[name] for name in readers})
        cut = {id(p) for m, _ in self._classes for p in m.parameters()}
        for segment in self._segments:
            for name, p in segment.named_parameters():  # norms
                if id(p) not in cut:
                    self._sum_gradient(name, p)

    # --- values ---------------------------------------------------------------------------------------------------

    def remove(self, model: nn.Module) -> None:
        """Gives the model its whole parameters and its own layers back. Collective."""
        for handle in self._handles:
            handle.remove()
        for name, p in model.named_parameters():
            if tensor_shard(p) is not None:
                p.data = whole_value(p, p.data, name)
                mark_tensor_shard(p, None)
        if self.loss is not None:
            del model._loss_function
        for module, base in self._classes:
            module.__class__ = base
            del module._tensor_link
        for module, attribute, value in self._attributes:
            setattr(module, attribute, value)


def _cut(param: nn.Parameter, shard: TensorShard) -> None:
    if tensor_shard(param) is None:  # a tied weight is met twice
        param.data = shard.cut(param.data)
        mark_tensor_shard(param, shard)


def _rows(module: nn.Module) -> int:
    """Of the whole weight."""
    weight: nn.Parameter = module.weight  # type: ignore[assignment]
    return whole_shape(weight)[0]


def _transposed(module: nn.Module) -> bool:
    """transformers' Conv1D keeps (in, out)."""
    return type(module).__name__ == "Conv1D"
