"""How often a micro-batch gathers each bucket of sharded values: the engine's own sharder on the meta device says so.

A bucket whose values backward does not read is gathered once; one that is used far apart, more than twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zeroengine.config import Config
from zeroengine.engine.experts import groups_of, spread_experts
from zeroengine.engine.mechanism import Mechanism, build_mechanism
from zeroengine.engine.parallel import share_layers, share_sequences
from zeroengine.planner.model import ModelSource
from zeroengine.planner.paper import PaperCommunicator, paper_mesh
from zeroengine.planner.rehearsal import loss_of
from zeroengine.planner.stage import even_routes, quiet, recompute

_WITHOUT = {"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}  # a plan has no files


def gathers_of(source: ModelSource, config: Mapping[str, Any], world: int, again: bool, sequence: int) -> dict[str, int]:
    """Gathers in a micro-batch by the bucket's subject (`Bucket.subject`), in a pass whose order of uses is known. `again`: blocks
    are recomputed."""
    settings = Config.load({**config, "zero_optimization": {**config.get("zero_optimization", {}), **_WITHOUT}})
    mesh, _ = paper_mesh(settings, world)
    with quiet():
        model = source.on_meta()
        if again:
            recompute(model)
        layers = share_layers(model, settings, mesh)
        sequences = share_sequences(model, settings, mesh, layers)
        groups = groups_of(mesh)
        experts = spread_experts(model, settings, mesh, groups, False, layers, sequences)
        even_routes(model, experts)
        mechanism = build_mechanism(model, settings, groups, trains=True)
    with torch.device("meta"):
        given = {**source.inputs(1, sequence), **({"use_cache": False} if hasattr(model, "config") else {})}
    streams = {b.comm for b in mechanism.buckets if isinstance(b.comm, PaperCommunicator)}
    for _ in range(2):
        for stream in streams:
            stream.gathered.clear()
        loss = loss_of(model(**given) if sequences is None else sequences.rehearse(model, given))
        loss.backward()
        del loss
        mechanism.sharder.end_backward()
        mechanism.reducer.next_micro_batch()
    return _counted(mechanism)


def _counted(mechanism: Mechanism) -> dict[str, int]:
    return {
        b.subject: b.comm.gathered[b.subject] if isinstance(b.comm, PaperCommunicator) else 0
        for b in mechanism.buckets
        if b.policy.shard_params
    }
