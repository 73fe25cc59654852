"""Launches through ctypes: the arguments of driver calls, on machines without a driver."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from struct import unpack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte.kernels.runtime import nvrtc
from halfbyte.linear import NvFp4Linear
from halfbyte.linear.w4a16.gemm_sm90 import launcher as gemm
from halfbyte.linear.w4a16.gemv import launcher as linear

DEVICE, STREAM, FUNCTION = 1, 0x123456789ABC, 0xABCDEF012345


class Driver:
    """Records calls of `cuLaunchKernelEx`, and returns `status`."""

    def __init__(self) -> None:
        self.status = 0
        self.first_statuses: list[int] = []
        """Return codes of the first calls, before `status`."""
        self.configs: list[int] = []
        self.functions: list[int] = []
        self.values: list[int] = []

    def __call__(self, config: int, function: int, pointers: bytes, extra: None) -> int:
        addresses = unpack(f"{len(pointers) // 8}P", pointers)
        self.configs.append(config)
        self.functions.append(function)
        self.values = [ctypes.c_int.from_address(address).value for address in addresses]
        return self.first_statuses.pop(0) if self.first_statuses else self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(nvrtc, "_launcher", lambda: made)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: DEVICE, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", {DEVICE: STREAM}.__getitem__, raising=False
    )
    nvrtc._launch_config.cache_clear()
    yield made
    nvrtc._launch_config.cache_clear()


@pytest.mark.parametrize("overlap", [False, True])
def test_structures_are_those_of_the_bindings(overlap: bool) -> None:
    bindings: Any = pytest.importorskip("cuda.bindings.driver")
    wanted = bindings.CUlaunchConfig()
    wanted.gridDimX, wanted.gridDimY, wanted.gridDimZ = 70_000, 1, 1
    wanted.blockDimX, wanted.blockDimY, wanted.blockDimZ = 384, 1, 1
    wanted.sharedMemBytes = 200_000
    wanted.hStream = STREAM
    if overlap:
        attribute = bindings.CUlaunchAttribute()
        kinds = bindings.CUlaunchAttributeID
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        wanted.attrs, wanted.numAttrs = [attribute], 1
    found = nvrtc._launch_config(70_000, 384, 200_000, STREAM, overlap)
    there = nvrtc._LaunchConfig.from_address(int(wanted.getPtr()))
    before_attributes = nvrtc._LaunchConfig.attributes.offset
    assert bytes(found)[:before_attributes] == bytes(there)[:before_attributes]
    assert found.attribute_count == there.attribute_count == int(overlap)
    assert bool(found.attributes) == overlap
    if overlap:
        assert bytes(found.attributes[0]) == bytes(there.attributes[0])


def test_sizes_are_those_of_the_header() -> None:
    assert ctypes.sizeof(nvrtc._LaunchConfig) == 56
    assert ctypes.sizeof(nvrtc._LaunchAttribute) == 72


@pytest.mark.parametrize(("overlap", "capability"), [(False, 90), (True, 80), (True, 90)])
def test_what_a_launch_tells_the_driver(
    driver: Driver, overlap: bool, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "compute_capability_of_gpu", lambda device: capability)
    arguments = [ctypes.c_int(value) for value in (5, 6, 7)]
    nvrtc.launch(nvrtc.Kernel(FUNCTION, 4096, DEVICE), 10, 256, arguments, overlap=overlap)
    (config,) = (nvrtc._LaunchConfig.from_address(address) for address in driver.configs)
    assert (*config.grid, *config.block) == (10, 1, 1, 256, 1, 1)
    assert (config.shared_bytes, config.stream) == (4096, STREAM)
    assert config.attribute_count == int(overlap and capability == 90)
    assert driver.functions == [FUNCTION]
    assert driver.values == [5, 6, 7]


@pytest.mark.parametrize(("overlap", "capability"), [(False, 90), (True, 80), (True, 90)])
def test_launches_that_overlap_leave_no_room_for_more_ctas(
    driver: Driver, overlap: bool, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[tuple[int, int]] = []
    monkeypatch.setattr(nvrtc, "_allow_shared_bytes", lambda *given: allowed.append(given))
    monkeypatch.setattr(nvrtc, "compute_capability_of_gpu", lambda device: capability)
    sm = SimpleNamespace(shared_memory_per_multiprocessor=228 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sm)
    nvrtc._shared_bytes_for.cache_clear()
    kernel = nvrtc.Kernel(FUNCTION, 4096, DEVICE)
    for _ in range(2):
        nvrtc.launch(kernel, 10, 256, [ctypes.c_int(1)], overlap=overlap, ctas_per_sm=2)
    nvrtc._shared_bytes_for.cache_clear()
    (address,) = set(driver.configs)
    used = nvrtc._LaunchConfig.from_address(address).shared_bytes
    if overlap and capability == 90:
        assert (228 * 1024) // (used + 1024) == 2
        assert allowed == [(FUNCTION, used)]
    else:
        assert (used, allowed) == (4096, [])


def test_a_kernel_runs_on_the_gpu_it_was_loaded_for(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [DEVICE]

    @contextmanager
    def entered(device: int) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1])
    streams = {DEVICE: STREAM, DEVICE + 1: STREAM + 16}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.__getitem__)
    capabilities = {DEVICE: 80, DEVICE + 1: 90}
    monkeypatch.setattr(nvrtc, "compute_capability_of_gpu", capabilities.__getitem__)
    for device in streams:
        nvrtc.launch(nvrtc.Kernel(FUNCTION, 0, device), 10, 256, [ctypes.c_int(1)], overlap=True)
    told = [nvrtc._LaunchConfig.from_address(address) for address in driver.configs]
    assert [config.stream for config in told] == list(streams.values())
    assert [config.attribute_count for config in told] == [0, 1]
    assert current == [DEVICE]


def test_launches_alike_share_what_they_tell(driver: Driver) -> None:
    """The shared configuration is never written again, so several threads may launch at once."""
    for grid in (10, 10, 11):
        nvrtc.launch(nvrtc.Kernel(FUNCTION, 0, DEVICE), grid, 256, [ctypes.c_int(1)])
    first, again, other = driver.configs
    assert first == again != other


def test_errors_are_named(driver: Driver) -> None:
    pytest.importorskip("cuda.bindings.driver")
    driver.status = 1
    with pytest.raises(RuntimeError, match=r"^CUDA: CUDA_ERROR_INVALID_VALUE \(1\)$"):
        nvrtc.launch(nvrtc.Kernel(FUNCTION, 0, DEVICE), 1, 32, [])


def test_a_threads_first_launch_binds_the_context(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[int] = []
    monkeypatch.setattr(nvrtc, "_bind_context", bound.append)
    driver.first_statuses = [201]
    nvrtc.launch(nvrtc.Kernel(FUNCTION, 0, DEVICE), 10, 256, [ctypes.c_int(8)])
    assert bound == [DEVICE]
    assert driver.functions == [FUNCTION] * 2
    assert driver.values == [8]
    pytest.importorskip("cuda.bindings.driver")
    driver.status = 201
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_INVALID_CONTEXT \(201\)"):
        nvrtc.launch(nvrtc.Kernel(FUNCTION, 0, DEVICE), 10, 256, [])


@pytest.mark.parametrize(("system", "library"), [("posix", "libcuda.so.1"), ("nt", "nvcuda.dll")])
def test_the_driver_gets_addresses(
    monkeypatch: pytest.MonkeyPatch, system: str, library: str
) -> None:
    libraries = {library: SimpleNamespace(cuLaunchKernelEx=SimpleNamespace())}
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", libraries.__getitem__)
    monkeypatch.setattr(nvrtc, "os", SimpleNamespace(name=system))
    nvrtc._launcher.cache_clear()
    try:
        assert nvrtc._launcher().argtypes == [ctypes.c_void_p] * 4
    finally:
        nvrtc._launcher.cache_clear()


@pytest.mark.gpu
def test_gpu_launches_from_a_fresh_thread() -> None:
    layer = NvFp4Linear.from_float(torch.nn.Linear(256, 128, device="cuda").bfloat16())
    x = torch.randn(1, 256, device="cuda").bfloat16()
    expected = layer(x)
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(layer(x)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], expected)


@pytest.mark.parametrize(
    ("params", "work"),
    [(linear._GemvParams, linear._GemvWork), (gemm._Params, gemm._Work)],
    ids=["few", "wide"],
)
def test_what_calls_share_lies_where_its_fields_would(
    params: type[ctypes.Structure], work: type[ctypes.Structure]
) -> None:
    """The sources have one flat structure."""
    *fields, (name, _) = params._fields_  # type: ignore[misc]

    class Flat(ctypes.Structure):
        _fields_ = (*fields, *work._fields_)

    begin = getattr(params, name).offset
    for field in work._fields_:
        assert getattr(Flat, field[0]).offset == begin + getattr(work, field[0]).offset
    assert ctypes.sizeof(Flat) == ctypes.sizeof(params)
