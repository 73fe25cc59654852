"""A pass over vLLM's compiled graphs: norms of q's and k's heads join their rotary embedding."""

from typing import Any, NamedTuple

import torch
from torch import fx
from vllm.compilation.passes.inductor_pass import InductorPass

# Registers the operators.
from halfbyte.elementwise import qk_norm_rotary_embedding as _fused  # noqa: F401

_RESHAPES = (
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default,
)


class _HeadNorm(NamedTuple):
    """A norm of heads, between two changes of shape."""

    source: fx.Node
    """Node of what is normalized, `[tokens, heads * head_size]`."""
    weight: Any
    epsilon: float


class FuseHeadNorms(InductorPass):
    """Replaces `rotary_embedding` of two results of `rms_norm` by one operator."""

    def uuid(self) -> str:
        """Key of vLLM's cached graphs: of all that decides what they call."""
        schema = str(torch.ops.halfbyte.qk_norm_rotary_embedding.default._schema)
        key: str = self.hash_source(self, _head_norm, _traced_arguments, schema)
        return key

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph in place; norms whose results are used elsewhere, too, stay."""
        operators = torch.ops.halfbyte
        target = operators.rotary_embedding.default
        for node in list(graph.find_nodes(op="call_function", target=target)):
            if node.kwargs:
                continue
            arguments: tuple[Any, ...] = node.args
            positions, query, key, table, head_size, interleaved = arguments
            q, k = _head_norm(query, head_size), _head_norm(key, head_size)
            if q is None or k is None or q.epsilon != k.epsilon:
                continue
            weights = (q.weight, k.weight, q.epsilon)
            arguments = (positions, q.source, k.source, *weights, table, head_size, interleaved)
            with graph.inserting_before(node):
                fused = graph.call_function(operators.qk_norm_rotary_embedding.default, arguments)
            fused.meta.update(node.meta)
            _traced_arguments(fused, node)
            node.replace_all_uses_with(fused)
            graph.erase_node(node)
            for last in (query, key):
                _erase_unused(graph, last)


def _head_norm(node: Any, head_size: int) -> _HeadNorm | None:
    """The norm whose result, in another shape, a node is; None if it is something else."""
    node = _before_reshapes(node)
    target = torch.ops.halfbyte.rms_norm.default
    if not isinstance(node, fx.Node) or node.target is not target or node.kwargs:
        return None
    arguments: tuple[Any, ...] = node.args
    x, weight, epsilon = arguments
    source = _before_reshapes(x)
    if len(node.users) > 1 or source is None or not _has_shape(x, 3, head_size):
        return None
    heads = x.meta["val"].shape[1]
    return _HeadNorm(source, weight, epsilon) if _has_shape(source, 2, heads * head_size) else None


def _before_reshapes(node: Any) -> Any:
    """What a node has in another shape; None if other nodes use what lies in between."""
    if not isinstance(node, fx.Node) or node.target not in _RESHAPES:
        return node
    return _before_reshapes(node.args[0]) if len(node.users) == 1 else None


def _has_shape(node: Any, dimensions: int, last: Any) -> bool:
    """Whether a node is known to be a tensor of so many dimensions, the last one of that size."""
    shape: Any = getattr(node.meta.get("val"), "shape", ()) if isinstance(node, fx.Node) else ()
    return len(shape) == dimensions and isinstance(shape[-1], int) and shape[-1] == last


def _traced_arguments(fused: fx.Node, node: fx.Node) -> None:
    """Give a node its own arguments as they were traced, in place of the rotary embedding's.

    Inductor keeps the strides that the tensors had there.
    """
    if "eager_input_vals" in node.meta:
        traced = [a.meta["val"] if isinstance(a, fx.Node) else a for a in fused.args]
        fused.meta["eager_input_vals"] = tuple(traced), {}


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a norm and the changes of shape around it, from the last one."""
    while not node.users:
        before: Any = node.args[0]
        graph.erase_node(node)
        if not isinstance(before, fx.Node) or before.target not in (
            *_RESHAPES,
            torch.ops.halfbyte.rms_norm.default,
        ):
            return
        node = before
