"""Trains a small byte-level GPT in a pipeline, on the source code of Python's own standard library, and compares the measured
timeline of a step with the simulated one.

    zerorun --nproc 4 examples/pipeline_gpt.py --stages 2      # 2 stages x 2 data-parallel ranks

The model is that of train_gpt.py as a list of layers. The embedding and the head share their weight across stages.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_gpt import BYTES, HEAD_WIDTH, Block, Windows, library_text

import zeroengine
from zeroengine.errors import ConfigError
from zeroengine.pipe import SCHEDULES, Costs, Kind, LayerSpec, PipelineModule, TiedLayerSpec, Timeline, simulate
from zeroengine.pipeline.draw import as_text, write_picture, write_trace


class Embedding(nn.Module):
    """int64 [batch, tokens] to [batch, tokens, width]."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(BYTES, width), nn.Embedding(length, width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))


class Head(nn.Module):
    """[batch, tokens, width] to logits; its table of tokens is the embedding's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.tokens = nn.LayerNorm(width), nn.Embedding(BYTES, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.tokens.weight)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def gpt(args: argparse.Namespace) -> PipelineModule:
    tie = "tokens.weight"
    layers = [
        TiedLayerSpec("tokens", Embedding, args.width, args.length, tied_weight_attr=tie),
        *[LayerSpec(Block, args.width) for _ in range(args.layers)],
        TiedLayerSpec("tokens", Head, args.width, tied_weight_attr=tie),
    ]
    return PipelineModule(layers, args.stages, loss, schedule=args.schedule, partition_method="type:Block")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--stages", type=int, default=2, help="pipeline ranks; the other ranks are data parallel (default %(default)s)")
    add("--schedule", default="1f1b", choices=sorted(SCHEDULES), help="default %(default)s")
    add("--micro-batches", type=int, default=8, help="micro-batches of a step (default %(default)s)")
    add("--zero", type=int, default=1, choices=range(4), help="ZeRO stage inside the pipeline's stages (default %(default)s)")
    add("--steps", type=int, default=60, help="optimizer steps (default %(default)s)")
    add("--layers", type=int, default=4, help="transformer blocks (default %(default)s)")
    add("--width", type=int, default=128, help="model width (default %(default)s)")
    add("--length", type=int, default=64, help="context in bytes (default %(default)s)")
    add("--bytes", type=int, default=1_000_000, help="text to train on (default %(default)s)")
    add("--output", type=Path, help="folder for timeline.json (Chrome trace) and, with matplotlib, timeline.png")
    args = parser.parse_args()
    if min(args.stages, args.steps, args.layers, args.length, args.micro_batches) < 1:
        parser.error("--stages, --steps, --layers, --length and --micro-batches must be at least 1")
    if args.width < HEAD_WIDTH or args.width % HEAD_WIDTH:
        parser.error(f"--width must be a multiple of {HEAD_WIDTH}, not {args.width}")
    if args.bytes < 20 * args.length:
        parser.error(f"--bytes {args.bytes}: too few for windows of --length {args.length}")
    return args


def simulated(measured: Timeline) -> Timeline:
    """The same schedule with the mean measured time of each kind of action in each stage, and messages for nothing."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for span in measured.spans:
        times[span.action.kind, span.action.stage].append(span.end - span.start)
    mean = {key: sum(values) / len(values) for key, values in times.items()}

    class Measured(Costs):
        def time(self, action):  # type: ignore[no-untyped-def]
            return mean[action.kind, action.stage]

    return simulate(measured.schedule, Measured())


def endless(windows: Windows, micro: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        pairs = [windows[int(i)] for i in torch.randint(len(windows), (micro,), generator=generator)]
        tokens, targets = zip(*pairs, strict=True)
        yield torch.stack(tokens), torch.stack(targets)


def main() -> None:
    args = parse_args()
    zeroengine.init_distributed(verbose=False)
    text = library_text(args.bytes)
    cut = len(text) * 9 // 10
    train, held_out = Windows(text[:cut], args.length), Windows(text[cut:], args.length)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": args.micro_batches,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "zero_optimization": {"stage": args.zero},
        "steps_per_print": None,
    }
    engine, *_ = zeroengine.initialize(model=gpt(args), config=config)
    rank = torch.distributed.get_rank()
    data = endless(train, 4, seed=engine.mesh.control.rank)
    before = float(engine.eval_batch(endless(held_out, 4, seed=99), 4))
    for step in range(1, args.steps + 1):
        value = float(engine.train_batch(data))
        if rank == 0 and (step == 1 or step % 10 == 0):
            sys.stdout.write(f"step {step}: loss {value:.4f}\n")
    measured = engine.timeline()
    after = float(engine.eval_batch(endless(held_out, 4, seed=99), 4))
    if rank == 0:
        ideal = simulated(measured)
        for name, timeline in (("measured", measured), ("simulated", ideal)):
            sys.stdout.write(f"{name}: {timeline.duration * 1e3:.1f} ms, idle {timeline.bubble:.1%}\n{as_text(timeline)}\n")
        sys.stdout.write(f"Held-out loss before: {before:.4f}\nHeld-out loss after: {after:.4f}\n")
        if args.output is not None:
            draw(args.output, measured, ideal)
    engine.destroy()


def draw(folder: Path, measured: Timeline, ideal: Timeline) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    panels = [("measured", measured), ("simulated", ideal)]
    write_trace(folder / "timeline.json", panels)
    try:
        write_picture(folder / "timeline.png", panels)
    except ConfigError as error:
        sys.stderr.write(f"no picture: {error}\n")


if __name__ == "__main__":
    main()
