"""How the layers of a model are split over a tensor group: plans for known families, and one that is worked out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from zeroengine.errors import ModelError
from zeroengine.moe.experts import ExpertBank

STYLES = {
    "colwise": "column", "colwise_gather_output": "column_gather", "rowwise": "row", "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "partial", "packed_colwise": "packed", "moe_tp_experts": "experts",
}  # fmt: skip
"""Hugging Face's names of styles, and ours. "partial": whole on each rank, used on a part, gradients summed."""

FAMILIES: dict[str, dict[str, str]] = {
    "gpt2": {
        "*.h.*.attn.c_attn": "fused", "*.h.*.attn.c_proj": "row", "*.h.*.mlp.c_fc": "column", "*.h.*.mlp.c_proj": "row",
        "*.wte": "vocabulary", "lm_head": "column_gather",
    },
    "opt": {
        "*.layers.*.self_attn.[qkv]_proj": "column", "*.layers.*.self_attn.out_proj": "row", "*.layers.*.fc1": "column",
        "*.layers.*.fc2": "row", "*.embed_tokens": "vocabulary", "lm_head": "column_gather",
    },
    "bert": {
        "*.layer.*.attention.self.(query|key|value)": "column", "*.layer.*.attention.output.dense": "row",
        "*.layer.*.intermediate.dense": "column", "*.layer.*.output.dense": "row",
    },
}  # fmt: skip
FAMILIES["roberta"] = FAMILIES["bert"]

_QKV = re.compile(r"(q|k|v|query|key|value|wq|wk|wv)(_proj|_lin|_linear)?$")
_OUT = re.compile(r"(o|out|wo|c|output|dense)(_proj|_lin|_linear)?$")
_BANK = {
    "gate_up_proj": "packed", "gate_up_proj_bias": "packed", "up_proj": "column", "up_proj_bias": "column", "down_proj": "row",
    "down_proj_bias": "once",
}  # fmt: skip
"""Parameters of `ExpertBank`. "once": whole, and added by one rank of the group."""
_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "nhead", "num_key_value_heads", "n_kv_heads", "num_kv_heads")


@dataclass(frozen=True)
class Plan:
    """Style by full name of a module or parameter; `origin` says where the plan comes from."""

    origin: str
    styles: Mapping[str, str]

    def without(self, modules: Iterable[str]) -> Plan:
        """The plan that leaves these modules, and all in them, whole."""
        outer = tuple(modules)
        left = {n: s for n, s in self.styles.items() if not any(n == m or n.startswith(f"{m}.") for m in outer)}
        return Plan(self.origin, left)

    def show(self) -> str:
        """One line for each group of layers that are split alike."""
        lines: dict[tuple[str, str], int] = {}
        for name, style in self.styles.items():
            key = re.sub(r"\.\d+(?=\.|$)", ".*", name), style
            lines[key] = lines.get(key, 0) + 1
        told = (f"{n} x{c} {s}" if c > 1 else f"{n} {s}" for (n, s), c in lines.items())
        return f"tensor plan ({self.origin}): " + "; ".join(told)


def plan_for(model: nn.Module, names: Iterable[str] | None = None, part: bool = False) -> Plan:
    """The plan of a known family, else the model's own `tp_plan` (transformers), else one worked out from its layers.

    `names`: of the modules and parameters that a plan by patterns is for, by default those of `model`. `part`: there may be nothing
    to split in these layers. Raises `ModelError` where none can be right.
    """
    known = list(names) if names is not None else _names(model)
    family = str(getattr(getattr(model, "config", None), "model_type", ""))
    if family in FAMILIES:
        return Plan(f"family {family}", dict(_match(known, FAMILIES[family])))
    own = getattr(model, "_tp_plan", None)
    if own:
        unknown = sorted({style for style in own.values() if style not in STYLES})
        if unknown:
            raise ModelError(
                f"{type(model).__name__}'s own tp_plan uses {', '.join(unknown)}, which cannot be split here; set mesh.tp to 1"
            )
        return Plan("the model's tp_plan", dict(_match(known, {name: STYLES[style] for name, style in own.items()})))
    return automatic_plan(model, part)


def automatic_plan(model: nn.Module, part: bool = False) -> Plan:
    """Splits every attention (q, k, v and output projections under one module), every pair of linear layers D -> H -> D, and every
    bank of experts.

    Raises `ModelError` if it finds neither (unless the layers are a `part` of a model), or a linear layer inside such a module
    whose role is not clear.
    """
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        linears = {n: m for n, m in module.named_children() if isinstance(m, nn.Linear)}
        inputs = [n for n in linears if _QKV.search(n)]
        prefix = f"{name}." if name else ""
        if len(inputs) >= 3:
            outs = [n for n in linears if n not in inputs and _OUT.search(n)]
            rest = set(linears) - set(inputs) - set(outs)
            if len(outs) != 1 or rest or len(inputs) != 3:
                raise ModelError(
                    f"'{name}' looks like an attention, but the roles of {sorted(linears)} are not clear; name its layers "
                    "q_proj, k_proj, v_proj, o_proj, or set mesh.tp to 1"
                )
            if not any(isinstance(getattr(module, h, None), int) for h in _HEADS):
                raise ModelError(
                    f"attention '{name}' has none of the attributes {', '.join(_HEADS[:4])}: its heads cannot be split; set mesh.tp to 1"
                )
            styles.update({prefix + n: "column" for n in inputs} | {prefix + outs[0]: "row"})
        elif _is_mlp(linears):
            *ups, down = linears
            styles.update({prefix + n: "column" for n in ups} | {prefix + down: "row"})
        elif isinstance(module, ExpertBank):
            styles.update({name: "experts"} | {prefix + n: _BANK[n] for n, p in module.named_parameters(recurse=False)})
    if not styles and not part:
        raise ModelError(
            f"{type(model).__name__} has no attention (q_proj, k_proj, v_proj, o_proj) and no pair of linear layers that could "
            "be split over mesh.tp ranks; set mesh.tp to 1"
        )
    return Plan("worked out from the layers", styles)


def head_attributes(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Attributes of an attention module that count heads."""
    for name in _HEADS:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def _is_mlp(linears: Mapping[str, nn.Linear]) -> bool:
    if len(linears) not in (2, 3):
        return False
    *ups, down = linears.values()
    wide = {(up.in_features, up.out_features) for up in ups}
    return len(wide) == 1 and next(iter(wide)) == (down.out_features, down.in_features)


def _names(model: nn.Module) -> list[str]:
    return list(dict.fromkeys([n for n, _ in model.named_modules()] + [n for n, _ in model.named_parameters()]))


def _match(names: Iterable[str], patterns: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    compiled = [(re.compile(_expression(p)), style) for p, style in patterns.items()]
    for name in names:
        for pattern, style in compiled:
            if pattern.fullmatch(name):
                yield name, style
                break


def _expression(pattern: str) -> str:
    """`*` is an index, and at the start any prefix; brackets and alternatives are those of regular expressions."""
    any_prefix = pattern.startswith("*.")
    rest = (pattern[2:] if any_prefix else pattern).replace(".", r"\.").replace("*", r"\d+")
    return (r"(?:.*\.)?" if any_prefix else "") + rest
