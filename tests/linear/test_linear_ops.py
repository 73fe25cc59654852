"""Operator calls skip the dispatcher, except under tracing, profiling or autograd."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from halfbyte.linear import NvFp4Linear, ops
from halfbyte.linear.w4a16.cpu import CpuKernel
from linear.cases import random_input, random_layer

Call = Callable[[], Any]


class Seen(TorchDispatchMode):
    """Records the names of dispatched operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        self.names.append(func.name())
        out: torch.Tensor = func(*args, **(kwargs or {}))
        return out


@pytest.fixture
def layer() -> NvFp4Linear:
    made = random_layer(8, 32, dtype=torch.float32, backend="reference")
    made.process_weights_after_loading()
    return made


@pytest.fixture
def x() -> torch.Tensor:
    return random_input(3, 32, torch.float32)


callers: list[str] = []


@ops.linear_op("nvfp4_linear_that_knows_its_caller")
def knows_its_caller(x: torch.Tensor, n: int) -> torch.Tensor:
    """Zeros `[..., n]`."""
    callers.append(sys._getframe(1).f_code.co_name)
    return x.new_zeros((*x.shape[:-1], n))


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_inference_calls_the_function(x: torch.Tensor, context: Callable[[], Any]) -> None:
    callers.clear()
    with context():
        knows_its_caller(x, 5)
        with Seen():
            knows_its_caller(x, 5)
    knows_its_caller(x, 5)  # gradients are on
    direct, *others = callers
    assert direct == "call"
    assert len(others) == 2
    assert "call" not in others


def test_a_call_looks_at_who_observes(x: torch.Tensor) -> None:
    assert not ops._can_skip_dispatcher(x), "gradients are on"
    with torch.inference_mode():
        assert not ops._can_skip_dispatcher(torch.nn.Parameter(x, requires_grad=False)), (
            "a subclass"
        )
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            assert not ops._can_skip_dispatcher(x)
        with Seen():
            assert not ops._can_skip_dispatcher(x)


@torch.inference_mode()
def test_modes_see_the_operator(layer: NvFp4Linear, x: torch.Tensor) -> None:
    with Seen() as seen:
        layer(x)
    assert "halfbyte::nvfp4_linear_reference" in seen.names


@torch.inference_mode()
def test_profiles_name_the_operator(layer: NvFp4Linear, x: torch.Tensor) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x)
    assert "halfbyte::nvfp4_linear_reference" in {event.key for event in profile.key_averages()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@torch.no_grad()
def test_traces_hold_the_operator(layer: NvFp4Linear, x: torch.Tensor) -> None:
    traced = torch.jit.trace(layer, (x,), check_trace=False)
    assert "halfbyte::nvfp4_linear_reference" in str(traced.inlined_graph)
    other = random_input(3, 32, torch.float32)
    assert torch.equal(traced(other), layer(other))


@torch.inference_mode()
def test_fake_tensors_get_the_fake_kernel(layer: NvFp4Linear) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = layer(torch.empty(5, 32))
    assert out.shape == (5, 8)
    assert mode is out.fake_mode


@torch.inference_mode()
def test_compiled_graphs_hold_the_operator(layer: NvFp4Linear, x: torch.Tensor) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Call:
        graphs.append(graph)
        return graph.forward

    wanted = layer(x)
    compiled = torch.compile(lambda x: layer(x), backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), wanted)
    (graph,) = graphs
    assert "halfbyte.nvfp4_linear_reference" in graph.code


def test_gradients_are_refused(layer: NvFp4Linear, x: torch.Tensor) -> None:
    out = layer(x.requires_grad_())
    with pytest.raises(RuntimeError, match="nvfp4_linear_reference is for inference"):
        out.sum().backward()


@pytest.fixture
def on_cpu() -> NvFp4Linear:
    """A kernel that reads addresses, which wrapper tensors do not have."""
    made = random_layer(8, 32, dtype=torch.float32, backend="cpu")
    if not CpuKernel.is_supported()[0]:
        pytest.skip("was not built")
    made.process_weights_after_loading()
    return made


@torch.no_grad()
def test_functorch_sees_the_operator(on_cpu: NvFp4Linear, x: torch.Tensor) -> None:
    wanted = on_cpu(x)
    assert torch.equal(torch.func.functionalize(on_cpu)(x), wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vmap says that it loops
        assert torch.equal(torch.func.vmap(on_cpu)(x), wanted)


@torch.no_grad()
def test_traces_before_dispatch_hold_the_operator(on_cpu: NvFp4Linear, x: torch.Tensor) -> None:
    traced = make_fx(lambda x: on_cpu(x), pre_dispatch=True)(x)
    assert "halfbyte.nvfp4_linear_cpu" in traced.code
    other = random_input(3, 32, torch.float32)
    assert torch.equal(traced(other), on_cpu(other))


@torch.inference_mode()
def test_function_modes_see_the_operator(layer: NvFp4Linear, x: torch.Tensor) -> None:
    seen: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        layer(x)
    assert any("nvfp4_linear_reference" in name for name in seen)
