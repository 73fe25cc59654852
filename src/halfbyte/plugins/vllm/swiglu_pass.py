"""A pass over vLLM's compiled graphs: SwiGLU behind an NVFP4 layer joins the layer's kernel."""

import inspect
import sys

import torch
from torch import fx
from vllm.compilation.passes.inductor_pass import InductorPass

# Registers the operators.
from halfbyte.elementwise import silu_and_mul as _silu_and_mul  # noqa: F401
from halfbyte.linear.w4a16 import swiglu as _swiglu  # noqa: F401


class FuseSwiGLU(InductorPass):
    """Replaces `silu_and_mul(nvfp4_linear_cuda(x, ...))` by one operator."""

    def uuid(self) -> str:
        """Key of vLLM's cached graphs: of all that decides what they call."""
        schema = str(torch.ops.halfbyte.nvfp4_linear_swiglu_cuda.default._schema)
        key: str = self.hash_source(inspect.getsource(sys.modules[__name__]), schema)
        return key

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph in place; a layer's result that is used elsewhere, too, stays."""
        operators = torch.ops.halfbyte
        linear = operators.nvfp4_linear_cuda.default
        activation = operators.silu_and_mul.default
        for node in list(graph.find_nodes(op="call_function", target=activation)):
            layer = node.args[0] if node.args else None
            if not isinstance(layer, fx.Node) or layer.target is not linear:
                continue
            if len(layer.users) > 1 or layer.kwargs:
                continue
            *arguments, n, batch_invariant = layer.args
            if batch_invariant or not isinstance(n, int):
                continue
            with graph.inserting_before(node):
                fused = graph.call_function(
                    operators.nvfp4_linear_swiglu_cuda.default, (*arguments, n // 2)
                )
            fused.meta.update(node.meta)
            _replace_traced_arguments(fused, layer)
            node.replace_all_uses_with(fused)
            graph.erase_node(node)
            graph.erase_node(layer)


def _replace_traced_arguments(fused: fx.Node, layer: fx.Node) -> None:
    """Give a node, in place of the activation's, the layer's arguments as they were traced.

    Inductor keeps the strides that the tensors had there; numbers are not recorded.
    """
    fused.meta.pop("eager_input_vals", None)
    if "eager_input_vals" in layer.meta:
        arguments, named = layer.meta["eager_input_vals"]
        fused.meta["eager_input_vals"] = arguments[: len(fused.args)], named
