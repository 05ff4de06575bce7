"""Public names of the pipeline."""

from zeroengine.pipeline.actions import Action, Kind, Schedule, ScheduleError
from zeroengine.pipeline.causal_lm import PipelinedCausalLM, split_causal_lm
from zeroengine.pipeline.checks import check
from zeroengine.pipeline.layers import LayerSpec, TiedLayerSpec
from zeroengine.pipeline.module import PipelineModule
from zeroengine.pipeline.partition import measure_layers
from zeroengine.pipeline.schedules import SCHEDULES, ScheduleRule, schedule_rule
from zeroengine.pipeline.simulate import Costs, Timeline, simulate

__all__ = [
    "SCHEDULES", "Action", "Costs", "Kind", "LayerSpec", "PipelineModule", "PipelinedCausalLM", "Schedule",
    "ScheduleError", "ScheduleRule", "TiedLayerSpec", "Timeline", "check", "measure_layers", "schedule_rule", "simulate",
    "split_causal_lm",
]  # fmt: skip
