"""`shared_attention` and `token_positions`: for layers of a `PipelineModule` whose ranks may share sequences (`mesh.cp`)."""

from zeroengine.parallel.stages import shared_attention, token_positions

__all__ = ["shared_attention", "token_positions"]
