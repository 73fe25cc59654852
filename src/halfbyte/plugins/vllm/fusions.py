"""halfbyte's passes over vLLM's compiled graphs as one: vLLM takes one of the user's."""

from typing import Any

from torch import fx
from vllm.compilation.passes.inductor_pass import InductorPass

from halfbyte.plugins.vllm.head_norm_pass import FuseHeadNorms
from halfbyte.plugins.vllm.swiglu_pass import FuseSwiGLU


class Fusions(InductorPass):
    """Runs passes one after another.

    Args:
        swiglu: with `FuseSwiGLU`.
        head_norms: with `FuseHeadNorms`.
    """

    def __init__(self, swiglu: bool, head_norms: bool) -> None:
        self.joins_head_norms = head_norms
        self.passes: list[Any] = []
        self.passes += [FuseSwiGLU()] if swiglu else []
        self.passes += [FuseHeadNorms()] if head_norms else []

    def uuid(self) -> str:
        """Key of vLLM's cached graphs."""
        own: str = self.hash_source(self)
        return "-".join([own, *(part.uuid() for part in self.passes)])

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph in place."""
        for part in self.passes:
            part(graph)
