"""Trains a small byte-level language model with mixtures of experts on the source code of Python's own standard library.

    zerorun --nproc 2 examples/moe_lm.py
    zerorun --nproc 2 examples/moe_lm.py --copies --plot load.png

The ranks share the experts of every layer. Routers are balanced without a loss: a bias moves against each expert's load after
every step. Shown at the end: the load of each expert in the first steps, when nothing was balanced yet, and in the last ones.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_gpt import library_text

import zeroengine
from zeroengine.moe import ExpertBank, MoE, RouterRule

BYTES = 256  # the vocabulary
HEAD_WIDTH = 32
BAR = 40  # characters of the longest bar


class Block(nn.Module):
    """Causal attention and a mixture of experts, [batch, tokens, width] to the same and the router's loss."""

    def __init__(self, width: int, experts: int, rule: RouterRule) -> None:
        super().__init__()
        self.norm_attention, self.norm_experts = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        shared = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.moe = MoE(width, ExpertBank(experts, width, 2 * width), rule=rule, shared=shared)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, tokens, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        mixed, loss, _ = self.moe(self.norm_experts(x))
        return x + mixed, loss


class Model(nn.Module):
    """The loss of the next byte and the routers' losses."""

    def __init__(self, layers: int, width: int, length: int, experts: int, rule: RouterRule) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(BYTES, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, experts, rule) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        routers = x.new_zeros(())
        for block in self.blocks:
            x, loss = block(x)
            routers = routers + loss
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), routers


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=200, help="optimizer steps (default %(default)s)")
    add("--layers", type=int, default=2, help="blocks (default %(default)s)")
    add("--width", type=int, default=128, help="width of the model (default %(default)s)")
    add("--length", type=int, default=128, help="context in bytes (default %(default)s)")
    add("--batch", type=int, default=8, help="sequences of a rank and step (default %(default)s)")
    add("--experts", type=int, default=8, help="experts of a layer (default %(default)s)")
    add("--k", type=int, default=2, help="experts of a token (default %(default)s)")
    add("--stage", type=int, default=2, choices=(0, 1, 2, 3), help="ZeRO stage (default %(default)s)")
    add("--bytes", type=int, default=2_000_000, help="text to train on (default %(default)s)")
    add("--bias-speed", type=float, default=0.005, help="step of the balancing bias (default %(default)s)")
    add("--copies", action="store_true", help="copy busy experts so that all ranks compute alike")
    add("--plot", type=Path, help="draw the loads here (needs matplotlib)")
    args = parser.parse_args()
    if min(args.steps, args.layers, args.length, args.batch, args.k) < 1 or args.experts < args.k:
        parser.error("--steps, --layers, --length, --batch and --k must be at least 1, and --experts at least --k")
    if args.width < HEAD_WIDTH or args.width % HEAD_WIDTH:
        parser.error(f"--width {args.width}: must be a multiple of {HEAD_WIDTH}")
    if args.bytes < 10 * (args.length + 1):
        parser.error(f"--bytes {args.bytes}: must be at least ten times --length + 1")
    return args


def settings(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage},
        "mesh": {"ep": ranks},
        "moe": {"copies": args.copies},
        "steps_per_print": None,
    }


def windows(text: Tensor, length: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """[batch, length] bytes from random places, and the same one byte later."""
    starts = torch.randint(len(text) - length - 1, (batch,), generator=generator)
    rows = torch.stack([text[s : s + length + 1] for s in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def loads(engine: Any) -> dict[str, list[float]]:
    """Of the last step, by layer: load of each expert over the mean, and last the busiest rank's. Collective."""
    found = {}
    for name, layer in engine.expert_statistics().items():
        mean = sum(layer.load) / len(layer.load)
        found[name] = [n / mean for n in layer.load] + [layer.skew]
    return found


def mean_loads(rows: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {name: torch.tensor([r[name] for r in rows]).mean(0).tolist() for name in rows[0]}


def show(before: dict[str, list[float]], after: dict[str, list[float]]) -> None:
    for name in before:
        sys.stdout.write(f"{name}: load of each expert over the mean, before and after balancing\n")
        highest = max(*before[name][:-1], *after[name][:-1])
        for expert, pair in enumerate(zip(before[name][:-1], after[name][:-1], strict=True)):
            for label, value in zip((f"{expert:4d}", "    "), pair, strict=True):
                sys.stdout.write(f"{label} {value:5.2f} {'#' * round(BAR * value / highest)}\n")
        sys.stdout.write(
            f"busiest expert {max(before[name][:-1]):.2f} before, {max(after[name][:-1]):.2f} after; busiest rank "
            f"{before[name][-1]:.2f} before, {after[name][-1]:.2f} after\n"
        )


def plot(path: Path, before: dict[str, list[float]], after: dict[str, list[float]]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(before), squeeze=False, figsize=(5 * len(before), 3.5))
    for axis, name in zip(axes[0], before, strict=True):
        places = torch.arange(len(before[name]) - 1)
        axis.bar((places - 0.2).tolist(), before[name][:-1], 0.4, label="before")
        axis.bar((places + 0.2).tolist(), after[name][:-1], 0.4, label="after")
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set(title=name, xlabel="expert", ylabel="load over the mean")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    args = parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if args.experts % ranks:
        raise SystemExit(f"--experts {args.experts}: must be a multiple of the {ranks} ranks")
    torch.manual_seed(0)
    rule = RouterRule(k=args.k, score="sigmoid", normalize=True, bias_speed=args.bias_speed, aux_weight=0.0, z_weight=1e-3)
    model = Model(args.layers, args.width, args.length, args.experts, rule)
    engine, *_ = zeroengine.initialize(model=model, config=settings(args, ranks))
    text, generator = library_text(args.bytes), torch.Generator().manual_seed(rank)
    seen: list[dict[str, list[float]]] = []
    around = max(1, min(10, args.steps // 2))  # steps whose loads are averaged
    for step in range(args.steps):
        tokens, targets = windows(text, args.length, args.batch, generator)
        loss, routers = engine(tokens.to(engine.device), targets.to(engine.device))
        engine.backward(loss + routers)
        engine.step()
        if step < around or step >= args.steps - around:
            seen.append(loads(engine))
        if rank == 0 and (step + 1) % 20 == 0:
            sys.stdout.write(f"step {step + 1}: loss {float(loss.detach()):.3f}\n")
    before, after = mean_loads(seen[:around]), mean_loads(seen[-around:])
    if rank == 0:
        show(before, after)
        if args.plot is not None:
            plot(args.plot, before, after)
    sys.stdout.write(f"rank {rank}: last loss {float(loss.detach()):.3f}\n")
    sys.stdout.flush()
    engine.destroy()


if __name__ == "__main__":
    main()
