"""`zerorun export` and `zerorun inspect`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import torch

from zeroengine.arguments import Parser
from zeroengine.checkpoint.model_folder import FORMATS, parse_size
from zeroengine.checkpoint.offline import SavedCheckpoint, export_weights
from zeroengine.device import DTYPES

_STATES = ("model", "master", "optim")


def _parser(name: str, summary: str) -> Parser:
    parser = Parser(prog=f"zerorun {name}", description=summary, allow_abbrev=False)
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint (DIR/TAG), or a DIR with its latest one")
    parser.add_argument("--tag", help="which checkpoint of DIR (default: the latest complete one)")
    parser.add_argument("--allow-pickle", action="store_true", help="reads client_state of any classes: only if you trust it")
    return parser


def export(argv: Sequence[str]) -> int:
    """Writes a checkpoint's weights as model files; returns the exit code."""
    parser = _parser("export", "Writes the weights of a checkpoint as a model folder. Memory holds one parameter at a time.")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--format", choices=sorted(FORMATS), default="safetensors", help="default: safetensors")
    parser.add_argument(
        "--dtype", choices=["as-used", *DTYPES], default="as-used",
        help="type of floating-point weights: fp32 reads the masters; as-used (default) is the type they were trained in",
    )  # fmt: skip
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="cuts the weights into files (default: 5GB)")
    given = parser.parse_args(list(argv))
    saved = SavedCheckpoint(given.checkpoint, given.tag, allow_pickle=given.allow_pickle)
    entries = export_weights(
        saved, given.out, format=given.format, dtype=DTYPES.get(given.dtype), shard_bytes=parse_size(given.max_shard_size)
    )
    size = sum(entry.nbytes for entry in entries)
    sys.stdout.write(f"{saved.folder}: {len(entries)} tensors, {size / 1e6:.1f} MB written to {given.out}\n")
    return 0


def inspect(argv: Sequence[str]) -> int:
    """Says what a checkpoint holds; returns 1 if --verify finds damage."""
    parser = _parser("inspect", "Says what is in a checkpoint: tensors, counters, sizes, health.")
    parser.add_argument("--tensors", action="store_true", help="lists every tensor with its shape, type and bytes")
    parser.add_argument("--verify", action="store_true", help="reads every byte: checksums, and non-finite values")
    parser.add_argument("--json", action="store_true", help="for programs")
    given = parser.parse_args(list(argv))
    saved = SavedCheckpoint(given.checkpoint, given.tag, allow_pickle=given.allow_pickle)
    facts = describe(saved, tensors=given.tensors or given.json, verify=given.verify)
    sys.stdout.write((json.dumps(facts, indent=1) if given.json else "\n".join(_lines(facts))) + "\n")
    return 1 if facts["damaged_files"] or facts["non_finite"] else 0


def describe(saved: SavedCheckpoint, *, tensors: bool = False, verify: bool = False) -> dict[str, Any]:
    """Facts about a checkpoint as plain values. `damaged_files` and `non_finite` are None unless `verify`."""
    values, marker = saved.values(), saved.marker
    sizes = dict.fromkeys(_STATES, 0)
    count = dict.fromkeys(_STATES, 0)
    for key, (shape, dtype) in saved.index.items():
        kind = key.partition(".")[0]
        sizes[kind] = sizes.get(kind, 0) + shape.numel() * dtype.itemsize
        count[kind] = count.get(kind, 0) + 1
    parameters = {k.removeprefix("model."): s.numel() for k, (s, _) in saved.index.items() if k.startswith("model.")}
    damaged = list(saved.damaged()) if verify else None
    facts: dict[str, Any] = {
        "folder": str(saved.folder),
        "saved_at": datetime.fromtimestamp(marker.saved_at / 1e9, timezone.utc).isoformat(timespec="seconds"),
        "ranks": marker.world,
        "zeroengine": marker.zeroengine,
        "torch": marker.torch,
        "global_steps": values.get("global_steps"),
        "global_samples": values.get("global_samples"),
        "skipped_steps": values.get("skipped_steps"),
        "optimizer": values.get("optimizer"),
        "learning_rates": [float(g["lr"]) for g in values.get("param_groups", []) if "lr" in g],
        "loss_scale": values.get("loss_scaler", {}).get("scale"),
        "elements": sum(parameters.values()),
        "tied": values.get("other_names", {}),
        "without": values.get("excluded", []),
        "client_state": sorted(map(str, values.get("client_state", {}))),
        "tensors_by_kind": count,
        "bytes_by_kind": sizes,
        "files": {name: {"bytes": size, "crc32": f"{crc:08x}"} for name, (size, crc) in sorted(marker.files.items())},
        "damaged_files": damaged,
        "non_finite": None if damaged is None else [] if damaged else _non_finite(saved),
    }
    if tensors:
        facts["tensors"] = {
            key: {"shape": list(shape), "dtype": str(dtype).removeprefix("torch."), "bytes": shape.numel() * dtype.itemsize}
            for key, (shape, dtype) in sorted(saved.index.items())
        }
    return facts


def _non_finite(saved: SavedCheckpoint) -> list[str]:
    floating = [k for k, (_, d) in sorted(saved.index.items()) if d.is_floating_point or d.is_complex]
    return [key for key in floating if not bool(torch.isfinite(saved.read(key)).all())]


def _lines(facts: dict[str, Any]) -> list[str]:
    def mb(size: int) -> str:
        return f"{size / 1e6:.3f} MB"

    lines = [
        f"{facts['folder']}",
        f"  saved      {facts['saved_at']} by {facts['ranks']} ranks, zeroengine {facts['zeroengine']}, torch {facts['torch']}",
        f"  steps      {facts['global_steps']} ({facts['skipped_steps']} skipped), {facts['global_samples']} samples",
        f"  optimizer  {facts['optimizer']}, learning rates {facts['learning_rates']}, loss scale {facts['loss_scale']}",
        f"  elements   {facts['elements']:,} in weights and buffers",
    ]
    for kind, size in facts["bytes_by_kind"].items():
        lines.append(f"  {kind:<9}  {facts['tensors_by_kind'][kind]} tensors, {mb(size)}")
    if facts["tied"]:
        lines.append("  tied       " + ", ".join(f"{a} = {b}" for a, b in facts["tied"].items()))
    if facts["without"]:
        lines.append(f"  without    {len(facts['without'])} frozen parameters: {', '.join(facts['without'][:5])}")
    if facts["client_state"]:
        lines.append(f"  client     {', '.join(facts['client_state'])}")
    lines += [f"  file       {name}: {mb(f['bytes'])}, crc32 {f['crc32']}" for name, f in facts["files"].items()]
    for key, t in facts.get("tensors", {}).items():
        lines.append(f"  {key}  {tuple(t['shape'])} {t['dtype']} {t['bytes']} bytes")
    if facts["damaged_files"] is None:
        lines.append("  health     complete; all files have their full length (--verify compares every byte)")
    elif facts["damaged_files"]:
        lines.append(f"  health     DAMAGED: {', '.join(facts['damaged_files'])}")
    elif facts["non_finite"]:
        lines.append(f"  health     checksums right; NON-FINITE values in {', '.join(facts['non_finite'][:10])}")
    else:
        lines.append("  health     complete, checksums right, all values finite")
    return lines
