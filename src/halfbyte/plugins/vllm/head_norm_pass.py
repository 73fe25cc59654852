"""A pass over vLLM's compiled graphs: norms of q's and k's heads join their rotary embedding."""

import inspect
import sys
from typing import Any, NamedTuple

import torch
from torch import fx
from vllm.compilation.passes.inductor_pass import InductorPass

# Registers the operators.
from halfbyte.elementwise import qk_norm_rotary_embedding as _fused  # noqa: F401
from halfbyte.elementwise.rotary import MAX_NORMED_HEAD

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
        key: str = self.hash_source(inspect.getsource(sys.modules[__name__]), schema)
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
            if not all(map(_is_input, (q.weight, k.weight, table))):
                continue  # the kernel reads them before the previous one has ended
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


def _head_norm(rotated: Any, head_size: Any) -> _HeadNorm | None:
    """The norm whose result, in another shape, a node is; None if it is something else."""
    if not isinstance(head_size, int) or head_size > MAX_NORMED_HEAD:
        return None
    norm = _before_reshapes(rotated)
    target = torch.ops.halfbyte.rms_norm.default
    if not isinstance(norm, fx.Node) or norm.target is not target or norm.kwargs:
        return None
    arguments: tuple[Any, ...] = norm.args
    x, weight, epsilon = arguments
    source, shape = _before_reshapes(x), _shape_of(x)
    is_by_head = len(shape) == 3 and shape[-1] == head_size
    if len(norm.users) > 1 or not is_by_head or _shape_of(source) != _shape_of(rotated):
        return None
    return _HeadNorm(source, weight, epsilon)


def _is_input(node: Any) -> bool:
    """Whether a node is an input of the graph, as weights are."""
    return isinstance(node, fx.Node) and node.op in ("placeholder", "get_attr")


def _before_reshapes(node: Any) -> Any:
    """What a node has in another shape; None if other nodes use what lies in between."""
    if not isinstance(node, fx.Node) or node.target not in _RESHAPES:
        return node
    return _before_reshapes(node.args[0]) if len(node.users) == 1 else None


def _shape_of(node: Any) -> tuple[Any, ...]:
    """The shape of a tensor; empty if it is not known."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(getattr(value, "shape", ()))


def _traced_arguments(fused: fx.Node, node: fx.Node) -> None:
    """Give a node its own arguments as they were traced, in place of the rotary embedding's.

    Inductor keeps the strides that the tensors had there.
    """
    if "eager_input_vals" in node.meta:
        traced = [a.meta.get("val") if isinstance(a, fx.Node) else a for a in fused.args]
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
