"""What is combined, what cannot be, and the configuration of a combination."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.composition.cover import Cover, Part, Row, Rule
from tests.composition.models import CLIP, EPS, RATE, SAMPLES, SCALE_POWER

FACTORS: dict[str, tuple[Any, ...]] = {
    "ranks": (2, 4),
    "model": ("gpt", "moe", "moe aux"),
    "stage": (0, 1, 2, 3),
    "replicas": (1, 2),
    "tensor": ("1", "2", "2+sp"),
    "sequence": ("1", "ulysses 2", "ring 2", "ulysses 2 x ring 2"),
    "pipeline": ("1", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"),
    "experts": (1, 2),
    "recompute": ("no", "yes"),
    "offload": ("no", "optimizer cpu", "optimizer nvme", "params cpu", "params and optimizer nvme"),
    "dtype": ("fp32", "bf16", "fp16"),
    "accumulation": (1, 4),
}
"""Two stages in every pipeline, two ranks in every tensor group, two expert ranks."""
TITLES = {
    "ranks": "processes", "model": "model", "stage": "ZeRO stage", "replicas": "`dp_replicate`", "tensor": "`tp`", "sequence": "`cp`",
    "pipeline": "pipeline", "experts": "`ep`", "recompute": "recompute", "offload": "offload", "dtype": "type",
    "accumulation": "accumulation",
}  # fmt: skip


def degrees(replicas: int, tensor: str, sequence: str, pipeline: str) -> dict[str, int]:
    cp = {"1": 1, "ulysses 2": 2, "ring 2": 2}.get(sequence, 4)
    return {"pp": 1 if pipeline == "1" else 2, "dp_replicate": replicas, "cp": cp, "tp": 1 if tensor == "1" else 2}


def _product(ranks: int, replicas: int, tensor: str, sequence: str, pipeline: str) -> int:
    total = 1
    for degree in degrees(replicas, tensor, sequence, pipeline).values():
        total *= degree
    return total


def _too_many(ranks: int, replicas: int, tensor: str, sequence: str, pipeline: str) -> bool:
    return ranks % _product(ranks, replicas, tensor, sequence, pipeline) != 0


def _experts_do_not_fit(ranks: int, replicas: int, tensor: str, sequence: str, pipeline: str, experts: int) -> bool:
    if _too_many(ranks, replicas, tensor, sequence, pipeline):
        return True
    made = degrees(replicas, tensor, sequence, pipeline)
    return ranks // (made["pp"] * made["dp_replicate"] * made["tp"]) % experts != 0


RULES = (
    Rule("degrees that do not divide the ranks", ("ranks", "replicas", "tensor", "sequence", "pipeline"), _too_many),
    Rule(
        "experts over more ranks than share one state", ("ranks", "replicas", "tensor", "sequence", "pipeline", "experts"),
        _experts_do_not_fit,
    ),
    Rule("experts of a model that has none", ("model", "experts"), lambda model, ep: model == "gpt" and ep > 1),
    Rule("a router's loss of all stages", ("model", "pipeline"), lambda model, pp: model == "moe aux" and pp != "1"),
    Rule("too few micro-batches", ("pipeline", "accumulation"), lambda pp, count: pp == "dualpipe-v" and count < 4),
)  # fmt: skip


@cache
def pairs() -> tuple[tuple[Row, ...], tuple[Part, ...]]:
    """Rows on 2 and 4 processes that hold every pair, and pairs that no legal row holds."""
    rows, impossible = Cover(FACTORS, RULES).rows()
    return tuple(rows), tuple(impossible)


@cache
def triples() -> tuple[tuple[Row, ...], tuple[Part, ...]]:
    """Rows that hold, beside those of `pairs`, every triple; and triples that no legal row holds."""
    rows, impossible = Cover(FACTORS, RULES, 3).rows(pairs()[0])
    return tuple(rows), tuple(impossible)


@cache
def eight(strength: int = 2) -> tuple[tuple[Row, ...], tuple[Part, ...]]:
    """Rows on 8 processes for the pairs, or triples beside those, that fewer cannot hold; and what 8 cannot hold either."""
    fewer = pairs()[0] if strength == 2 else (*pairs()[0], *triples()[0])
    there = [*(row | {"ranks": 8} for row in fewer), *(() if strength == 2 else eight()[0])]
    rows, impossible = Cover({**FACTORS, "ranks": (8,)}, RULES, strength).rows(there)
    return tuple(rows), tuple(impossible)


def designs(everything: bool) -> list[tuple[Row, ...]]:
    """What is run, in order of weight: every pair; and `everything`: what only 8 processes hold of them, then every triple."""
    return [pairs()[0], *((eight()[0], triples()[0], eight(3)[0]) if everything else ())]


@cache
def possible(strength: int) -> tuple[frozenset[Part], frozenset[Part]]:
    """The combinations of so many levels that some row on 2 or 4 processes holds, and those (without the number of processes) that
    only rows on 8 hold."""
    every = frozenset(Cover(FACTORS, RULES, strength).parts())
    fewer = every - frozenset((pairs if strength == 2 else triples)()[1])
    free = frozenset(part for part in every - fewer if part[0][0] != "ranks")
    return fewer, free - frozenset(eight(strength)[1])


def label(row: Row) -> str:
    made = degrees(row["replicas"], row["tensor"], row["sequence"], row["pipeline"])
    named = [f"{row['ranks']} ranks", row["model"], f"ZeRO {row['stage']}", row["dtype"], f"x{row['accumulation']}"]
    named += [f"{row['replicas']} replicas"] if row["replicas"] > 1 else []
    named += [f"tp {row['tensor']}"] if row["tensor"] != "1" else []
    named += [row["sequence"]] if row["sequence"] != "1" else []
    named += [f"pp {made['pp']} {row['pipeline']}"] if row["pipeline"] != "1" else []
    named += [f"ep {row['experts']}"] if row["experts"] > 1 else []
    named += ["recompute"] if row["recompute"] == "yes" else []
    named += [f"offload {row['offload']}"] if row["offload"] != "no" else []
    return ", ".join(named)


def settings(row: Row, folder: str) -> dict[str, Any]:
    """The engine's configuration of a combination; files of offloaded state go to `folder`."""
    made = degrees(row["replicas"], row["tensor"], row["sequence"], row["pipeline"])
    groups = row["ranks"] // (made["pp"] * made["tp"] * made["cp"])
    zero: dict[str, Any] = {"stage": row["stage"], "bucket_size": 3000, "stage3_param_persistence_threshold": 30}
    if row["replicas"] > 1:
        zero["stage3_max_live_parameters"] = 6000
    for word, section in (("optimizer", "offload_optimizer"), ("params", "offload_param")):
        if word in row["offload"]:
            device = row["offload"].rpartition(" ")[2]
            zero[section] = {"device": device} | ({"nvme_path": folder} if device == "nvme" else {})
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES // groups,
        "gradient_accumulation_steps": row["accumulation"],
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "eps": EPS, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "mesh": {**made, "ep": row["experts"]},
        "tensor_parallel": {"sequence_parallel": row["tensor"] == "2+sp", "check_replicas_every": 1},
        "steps_per_print": None,
        "health": {"comm_timeout": 30},
    }
    if row["sequence"] != "1":
        kind = "usp" if "x" in row["sequence"] else row["sequence"].split()[0]
        config["sequence_parallel"] = {"attention": kind} | ({"ulysses": 2} if kind == "usp" else {})
    if row["dtype"] == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": SCALE_POWER, "hysteresis": 1}
    elif row["dtype"] == "bf16":
        config["bf16"] = {"enabled": True}
    return config
