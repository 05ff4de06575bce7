"""Checkpoints: pieces of named tensors through `torch.distributed.checkpoint`, whole or absent, loadable anywhere."""

from zeroengine.checkpoint.background import BackgroundSaver
from zeroengine.checkpoint.folder import LATEST, complete_tags, write_latest
from zeroengine.checkpoint.loading import Loaded, find_checkpoint, load, read_index
from zeroengine.checkpoint.ranks import agree
from zeroengine.checkpoint.rectangles import rectangles
from zeroengine.checkpoint.saving import save
from zeroengine.checkpoint.sharded import ShardedTensorView

__all__ = [
    "LATEST",
    "BackgroundSaver",
    "Loaded",
    "ShardedTensorView",
    "agree",
    "complete_tags",
    "find_checkpoint",
    "load",
    "read_index",
    "rectangles",
    "save",
    "write_latest",
]
