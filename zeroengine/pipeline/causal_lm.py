"""A Hugging Face causal language model cut into stages at its list of blocks. Every stage is the model's own code (`skeleton`), so names
stay the model's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

from zeroengine.errors import ModelError
from zeroengine.parallel.hf import predicts_next
from zeroengine.parallel.loss import IGNORED, next_token_targets
from zeroengine.parallel.segments import Segment, blocks_and_end
from zeroengine.parallel.vocabulary import VocabularyLoss
from zeroengine.pipeline.layers import Tie
from zeroengine.pipeline.module import PipelineModule
from zeroengine.pipeline.partition import PartitionMethod, balanced, layer_weights
from zeroengine.pipeline.schedules import ScheduleRule
from zeroengine.pipeline.skeleton import Skeleton, Trial
from zeroengine.zero.held import claim


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, [batch, tokens, vocabulary] against [batch, tokens]; -100 does not count."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def count_targets(targets: Tensor) -> int:
    return int((targets != IGNORED).sum())


def _check_loss(model: nn.Module) -> None:
    """The loss of the stages is that of the next token, and nothing else."""
    if not predicts_next(model):
        raise ModelError(
            f"{type(model).__name__} is no causal language model, whose targets are the next tokens; write it as a PipelineModule of layers"
        )
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ModelError(
            f"{type(model).__name__} adds a loss of its routers, which stages do not bring to the last one; set output_router_logits=False "
            "in the model's config, or mesh.pp to 1"
        )


def block_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The longest list of equal modules: the model's blocks. Raises `ModelError` where there is none."""
    found: tuple[str, nn.ModuleList] | None = None
    for name, child in model.named_modules():
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(m) for m in child}) == 1:
            if found is None or len(child) > len(found[1]):
                found = name, child
    if found is None:
        raise ModelError(f"{type(model).__name__} has no list of blocks to cut; write it as a PipelineModule of layers")
    return found


class PipelinedCausalLM(PipelineModule):
    """See `split_causal_lm`. Batches are dicts with `input_ids`, `labels` and what else the model's forward takes for each
    token (`attention_mask`, `position_ids`). `config` and `source_architecture` are the model's, `whole_names` the names of its modules
    and parameters, also of those on other stages."""

    def __init__(
        self, model: nn.Module, num_stages: int, schedule: str | ScheduleRule, virtual_stages: int | None,
        partition_method: PartitionMethod, stage_rank: int | None = None,
    ) -> None:  # fmt: skip
        _check_loss(model)
        nn.Module.__init__(self)
        claim(list(model.parameters()))
        self._configure(num_stages, schedule, virtual_stages, mean_loss, count_targets, stage_rank)
        self.dropout_seed, self.activation_checkpoint_interval = None, 0
        self.config, self.source_architecture = getattr(model, "config", None), type(model).__name__
        self.generation_config = getattr(model, "generation_config", None)
        self._tp_plan = dict(getattr(model, "_tp_plan", None) or {})
        self.whole_names = tuple(dict.fromkeys([*(n for n, _ in model.named_modules()), *(n for n, _ in model.named_parameters())]))
        path, blocks = block_list(model)
        names = [type(b).__name__ for b in blocks]
        self._blocks_path = path
        weights = layer_weights(partition_method, names, lambda: [sum(p.numel() for p in b.parameters()) for b in blocks])
        self.parts = balanced(weights, len(self.placement))
        trial = Trial(model, path)
        stages = [Skeleton(model, path, self.parts[s], self.parts[s + 1], trial) for s in range(len(self.placement))]
        trial.compare(stages)
        self._skeletons = {s: (stages[s],) for s in self.local_stages}  # a tuple: not registered a second time
        self.ties = self._keep_local(model, stages)

    def _keep_local(self, model: nn.Module, stages: list[Skeleton]) -> tuple[Tie, ...]:
        """Registers what this rank's stages use under the model's own names; finds weights that several stages use."""
        owners: dict[nn.Parameter, list[int]] = {}
        for s, skeleton in enumerate(stages):
            for p in skeleton.module.parameters():
                owners.setdefault(p, []).append(s)
        shared = [(n, p) for n, p in model.named_parameters() if len(owners.get(p, ())) > 1]
        self.tied = nn.Module()
        self._name_of_tie: dict[str, str] = {}
        ties = []
        for name, p in shared:
            key = name.replace(".", "_")
            if set(owners[p]) & set(self.local_stages):
                holder = nn.Module()
                holder.register_parameter("weight", p if isinstance(p, nn.Parameter) else None)
                self.tied.add_module(key, holder)
            self._name_of_tie[f"tied.{key}.weight"] = name
            uses = tuple(n for n, q in model.named_parameters(remove_duplicate=False) if q is p)
            ties.append(Tie(key, (f"tied.{key}.weight",), tuple(owners[p]), (uses,)))
        kept = {p for s in self.local_stages for p in stages[s].module.parameters()}
        used = {m for s in self.local_stages for m in stages[s].module.modules()}
        self._stage_of: dict[str, int] = {}
        root = _pruned(model, used)
        for name, child in root.named_children():
            self.add_module(name, child)
        for name, p in self.named_parameters():
            if p in kept and not name.startswith("tied."):
                self._stage_of[name] = owners[p][0]
        return tuple(sorted(ties, key=lambda t: t.key))

    @property
    def state_names_ties(self) -> bool:
        return False

    def train(self, mode: bool = True) -> PipelinedCausalLM:
        super().train(mode)
        for (skeleton,) in self._skeletons.values():
            skeleton.module.train(mode)
        return self

    def skeleton(self, stage: int) -> nn.Module:
        """The model's own modules as one local stage runs them."""
        return self._skeletons[stage][0].module

    def saved_name(self, name: str) -> str:
        """The model's own name of a tied weight, so that checkpoints are those of the model that is not cut."""
        return self._name_of_tie.get(name, name)

    def part_of(self, name: str) -> str:
        if name.startswith("tied."):
            return f"tied.{name.split('.')[1]}"
        return f"stage {self._stage_of[name]}"

    # --- what shares layers and sequences sees of the model -----------------------------------------------------------

    def set_attn_implementation(self, name: str) -> None:
        """As of the model that was cut."""
        for (skeleton,) in self._skeletons.values():
            skeleton.module.set_attn_implementation(name)

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        """As of the model that was cut: blocks are computed again in backward."""
        for (skeleton,) in self._skeletons.values():
            skeleton.module.gradient_checkpointing_enable(**options)

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """The same under the name that newer releases of transformers have."""
        for (skeleton,) in self._skeletons.values():
            skeleton.module.activation_checkpointing_enable(**options)

    @property
    def stage_forward(self) -> Callable[..., Any]:
        """The forward of the model that was cut."""
        (skeleton,) = self._skeletons[self.local_stages[0]]
        return cast(Callable[..., Any], skeleton.module.forward)

    @property
    def loss_function(self) -> VocabularyLoss | None:
        """In place of `loss_fn`: of logits that a tensor group has in parts."""
        return getattr(self, "_loss_function", None)

    @loss_function.setter
    def loss_function(self, value: VocabularyLoss) -> None:
        self._loss_function = value

    def loss(self, output: Any, labels: Any) -> Tensor:
        split = self.loss_function
        return super().loss(output, labels) if split is None else split.total(output, labels) / count_targets(labels)

    def segments(self, plan: Collection[str]) -> list[Segment]:
        """The blocks of each stage; behind those of the last one, the model's last norm."""
        found = []
        for s in self.local_stages:
            (skeleton,) = self._skeletons[s]
            end = blocks_and_end(skeleton.module)[1] if skeleton.last else None
            found.append(Segment(skeleton.blocks, splits=skeleton.first, joins=skeleton.last, end=end))
        return found

    # --- batches and stages -------------------------------------------------------------------------------------------

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, dict) or "input_ids" not in batch or "labels" not in batch:
            raise ModelError("a batch for a pipelined causal LM is a dict with input_ids and labels")
        return {k: v for k, v in batch.items() if k != "labels"}, next_token_targets(batch["labels"])

    def _run_stage(self, x: Any, stage: int, micro: int) -> Any:
        tokens = self.split_tokens
        if self.splits_tokens and not stage:
            tokens = next(x[name].shape[1] for name in ("input_ids", "inputs_embeds") if x.get(name) is not None)
        output = self._skeletons[stage][0](x, tokens)
        return output["inputs_embeds"] if stage == len(self.placement) - 1 else output


def _pruned(model: nn.Module, used: set[nn.Module]) -> nn.Module:
    """A shallow copy of the tree without modules that are not `used` or lead to none that is."""
    if model in used and not model._modules:
        return model
    kept = copy.copy(model)
    kept._modules = {}
    for name, child in model._modules.items():
        if child is not None and any(m in used for m in child.modules()):
            kept._modules[name] = child if set(child.modules()) <= used else _pruned(child, used)
    return kept


def split_causal_lm(
    model: nn.Module, num_stages: int, *, schedule: str | ScheduleRule = "1f1b", virtual_stages: int | None = None,
    partition_method: PartitionMethod = "uniform", stage_rank: int | None = None,
) -> PipelinedCausalLM:  # fmt: skip
    """Cuts a Hugging Face causal LM, whole in memory on every rank, into `num_stages` ranks' stages at its list of blocks.
    `partition_method` weighs blocks; `stage_rank`: whose stages to keep, for a plan (default: this process'). The stages are
    compared with the whole model first; raises `ModelError` where they differ. A model that was built inside `zero.Init` becomes whole,
    which is collective."""
    return PipelinedCausalLM(model, num_stages, schedule, virtual_stages, partition_method, stage_rank)
