"""The sections of monitors, logs and profilers."""

from __future__ import annotations

from typing import Annotated, Literal

from zeroengine.config.spec import Section, ignored, key
from zeroengine.config.values import Count, Flag, Integer, NonNegativeReal, Params, PositiveInteger, PositiveReal, Strings, Text, choice

_COUNTED = "recomputed forwards are counted as they run"
_OLD = "write `flops_profiler.profile_step`"
_NAME = "DeepSpeedJobName"


class FolderMonitorSection(Section):
    """Events of a step in files. Rank 0 writes."""

    enabled: Flag = key(False, "Write.")
    output_path: Text | None = key(None, "Folder. Null: the working directory.")
    job_name: Text = key(_NAME, "Folder below it for this run.")


class TensorboardSection(FolderMonitorSection):
    """Events for TensorBoard. Needs the package tensorboard."""


class CsvMonitorSection(FolderMonitorSection):
    """Events in CSV files, one for each name."""


class JsonlMonitorSection(Section):
    """Events in a file of JSON lines, one for each step: `events.jsonl`."""

    enabled: Flag = key(False, "Write.", ours=True)
    output_path: Text | None = key(None, "Folder. Null: the working directory.", ours=True)
    job_name: Text = key(_NAME, "Folder below it for this run.", ours=True)


class WandbSection(Section):
    """Events for Weights & Biases. Needs the package wandb."""

    enabled: Flag = key(False, "Log.")
    group: Text | None = key(None, "Group of runs.")
    team: Text | None = key(None, "Team or user that owns the project.")
    project: Text = key("deepspeed", "Project.")


CometMode = Annotated[Literal["get_or_create", "create", "get"], choice("get_or_create", "create", "get")]


class CometSection(Section):
    """Events for Comet. Needs the package comet_ml."""

    enabled: Flag = key(False, "Log.")
    samples_log_interval: PositiveInteger = key(100, "Samples between two values of an event.")
    project: Text | None = key(None, "Project.")
    workspace: Text | None = key(None, "Workspace.")
    api_key: Text | None = key(None, "API key. Null: from Comet's own configuration.")
    experiment_name: Text | None = key(None, "Name of the experiment.")
    experiment_key: Text | None = key(None, "Key of the experiment.")
    online: Flag | None = key(None, "Send at once, or keep in a file.")
    mode: CometMode | None = key(None, "Whether the experiment is made or found: get_or_create, create, get.")


class CommsLoggerSection(Section):
    """Counts, bytes and times of the collectives, by `engine.log_summary()`."""

    enabled: Flag = key(False, "Keep the log.")
    prof_all: Flag = key(True, "All kinds of operations; false: those of `prof_ops`.")
    prof_ops: Strings = key((), "Kinds of operations: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send, ...")
    verbose: Flag = key(False, "A line for each operation.")
    debug: Flag = key(False, "Keep operations apart by what they move (buckets, parameters).")


class FlopsProfilerSection(Section):
    """Operations, parameters and times of every module in one step."""

    enabled: Flag = key(False, "Profile.")
    profile_step: PositiveInteger = key(1, "Step of which the operations are counted; the next one is timed.")
    module_depth: Integer = key(-1, "Depth of the modules in the summary by depth; -1 is the deepest.")
    top_modules: PositiveInteger = key(1, "Kinds of modules in the summary by depth.")
    detailed: Flag = key(True, "The tree of all modules.")
    output_file: Text | None = key(None, "File of the profile. Null: the log.")
    peak_tflops: PositiveReal | None = key(
        None, "Peak of one device, for the utilisation. Null: what a large matrix product reaches, measured.", ours=True
    )
    recompute_fwd_factor: NonNegativeReal = ignored(0.0, "Forwards that are run again.", _COUNTED)
    start_step: Count | None = ignored(None, "Old name.", _OLD)
    end_step: Count | None = ignored(None, "Old name.", _OLD)


class TorchProfilerSection(Section):
    """Traces of torch.profiler, with ranges for phases and for operations on buckets. One file a rank."""

    enabled: Flag = key(False, "Trace.", ours=True)
    start_step: PositiveInteger = key(3, "The first step that is traced, counted from the start of the engine.", ours=True)
    steps: PositiveInteger = key(1, "Steps that are traced.", ours=True)
    output_path: Text = key("torch_profile", "Folder of the traces (Chrome's format).", ours=True)
    record_shapes: Flag = key(False, "Shapes of the arguments.", ours=True)
    profile_memory: Flag = key(False, "Allocations.", ours=True)
    with_stack: Flag = key(False, "Python stacks.", ours=True)


class MonitorSection(Section):
    """What a run writes for `zerorun report`, and where it leaves what explains a failure."""

    run_dir: Text | None = key(None, "Folder, one for each run. Null: nothing is written.", ours=True)
    timeline_step: PositiveInteger = key(
        3, "The step whose timeline and memory are recorded in full, counted from the start of the engine.", ours=True
    )
    plan: Text | None = key(
        None,
        "JSON file with predictions to show beside what is measured: `time`, seconds of a step by phase (compute, exposed communication, "
        "optimizer, idle), `memory`, bytes by kind beyond those that the layout predicts, and `traffic`, for each pipeline rank bytes of a "
        "step by `stream.operation`.",
        ours=True,
    )
    predicted: Params | None = key(
        None, "The same predictions in place of a file; `zerorun plan --write` writes them here.", ours=True, open_below=True
    )
    loss_every: PositiveInteger = key(1, "Steps between two records of the loss and the experts' load.", ours=True)
