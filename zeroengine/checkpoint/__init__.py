"""Checkpoints: pieces of named tensors through `torch.distributed.checkpoint`, whole or absent, loadable anywhere."""

from zeroengine.checkpoint.background import BackgroundSaver
from zeroengine.checkpoint.deepspeed import DeepSpeedCheckpoint, find_foreign
from zeroengine.checkpoint.files import Entry
from zeroengine.checkpoint.folder import LATEST, complete_tags, write_latest
from zeroengine.checkpoint.loading import Comparison, Loaded, find_checkpoint, load, read_index
from zeroengine.checkpoint.model_folder import ModelFolder, parse_size
from zeroengine.checkpoint.offline import SavedCheckpoint, export_weights
from zeroengine.checkpoint.ranks import Ranks
from zeroengine.checkpoint.rectangles import rectangles
from zeroengine.checkpoint.saving import save
from zeroengine.checkpoint.sharded import ShardedTensorView

__all__ = [
    "LATEST",
    "BackgroundSaver",
    "Comparison",
    "DeepSpeedCheckpoint",
    "Entry",
    "Loaded",
    "ModelFolder",
    "Ranks",
    "SavedCheckpoint",
    "ShardedTensorView",
    "complete_tags",
    "export_weights",
    "find_checkpoint",
    "find_foreign",
    "load",
    "parse_size",
    "read_index",
    "rectangles",
    "save",
    "write_latest",
]
