"""Edge-case inputs of store kernels, and the expected pages."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from halfbyte.kvcache.store.base import StoreInputs
from halfbyte.kvcache.store.reference import ReferenceStore
from halfbyte.layouts import PageLayout
from kvcache.page_arithmetic import KERNEL_DTYPES, UNQUANTIZED, Geometry, sentinel

Scale = float | torch.Tensor
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUM_PAGES, BLOCK_SIZE, HEADS = 5, 8, 3
SLOTS = (17, -1, 3, 39, -7, 0, 16, 25, -(10**12))
K_SCALE, V_SCALE = 0.0371, 0.0059

_SAME = [Geometry(dtype, dtype, 64, 64, HEADS, BLOCK_SIZE) for dtype in KERNEL_DTYPES]
_MIXED = [
    Geometry("fp8_e4m3", "nvfp4", 64, 64, HEADS, BLOCK_SIZE),
    Geometry("nvfp4", "fp8_e5m2", 48, 80, HEADS, BLOCK_SIZE),
    Geometry("bfloat16", "nvfp4_4over6", 40, 64, HEADS, BLOCK_SIZE),
    Geometry("mxfp4", "float32", 96, 20, HEADS, BLOCK_SIZE),
    Geometry("fp4_block16", "mxfp4", 16, 32, HEADS, BLOCK_SIZE),
    Geometry("nvfp4", "nvfp4", 192, 128, 1, BLOCK_SIZE),
    Geometry("nvfp4", "nvfp4", 512, 256, 2, 1),
    Geometry("fp8_e5m2", "float16", 7, 3, HEADS, 6),
]
_SM100 = [
    Geometry("nvfp4", "nvfp4", 64, 64, HEADS, BLOCK_SIZE, v_scale_layout="sm100"),
    Geometry("fp8_e4m3", "nvfp4_4over6", 32, 192, HEADS, BLOCK_SIZE, v_scale_layout="sm100"),
]
GEOMETRIES = [replace(g, order=order) for g in _SAME + _MIXED + _SM100 for order in ("HND", "NHD")]


def positional(store: Callable[[StoreInputs], None]) -> Callable[..., None]:
    """Adapts a store to the arguments of `reshape_and_cache`."""

    def call(*arguments: Any, **options: Any) -> None:
        store(StoreInputs(*arguments, **options))

    return call


reference_store = positional(ReferenceStore.store)


def nasty_values(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """float32: random blocks over many magnitudes, ties, zeros, subnormals, NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    count = 1
    for size in shape:
        count *= size
    x = torch.randn(-(-count // 32), 32, generator=generator)
    x *= torch.logspace(-9, 3, len(x))[:, None]
    kinds = torch.arange(len(x)) % 8
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -6.0] * 4)
    x[kinds == 1] = ties * 2.0 ** (torch.arange(len(x))[kinds == 1, None] % 9 - 6)
    x[kinds == 2] *= 2.0**-130  # float32 subnormals
    x[kinds == 3] = torch.randint(-24, 25, x[kinds == 3].shape, generator=generator) / 32
    flat = x.flatten()[:count]
    specials = [torch.nan, torch.inf, -torch.inf, -0.0, 0.0, -1e-45, 3.4e38, -3.4e38]
    places = torch.randperm(count, generator=generator)[: min(count // 24, 64)]
    flat[places] = torch.tensor(specials * 8)[: len(places)]
    flat[-16:] = -0.0
    return flat.reshape(shape)


@dataclass
class StoreCase:
    """Arguments of a store, and pages within a buffer of random bytes."""

    layout: PageLayout
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    k_scale: Scale = K_SCALE
    v_scale: Scale = V_SCALE
    before: int = 0
    """Bytes of a row of the buffer before the page."""
    after: int = 0
    num_pages: int = NUM_PAGES

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        self.buffer = sentinel(self.num_pages, self.before + self.layout.page_bytes + self.after)

    def pages(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[:, self.before : self.before + self.layout.page_bytes]

    def expected(self) -> torch.Tensor:
        """The buffer after the reference's store, on the CPU."""
        buffer = self.buffer.clone()
        slots = self.slots.clone()
        slots[slots >= self.num_pages * self.layout.block_size] = -1
        reference_store(
            self.key,
            self.value,
            self.pages(buffer),
            slots,
            self.layout,
            self.k_scale,
            self.v_scale,
        )
        return buffer

    def stored(self, store: Any, device: str = "cpu") -> torch.Tensor:
        """The buffer after `store`, run on a device."""

        def move(x: Any) -> Any:
            return x.to(device) if isinstance(x, torch.Tensor) else x

        buffer = self.buffer.to(device, copy=True)
        store(
            move(self.key),
            move(self.value),
            self.pages(buffer),
            move(self.slots),
            self.layout,
            move(self.k_scale),
            move(self.v_scale),
        )
        return buffer.cpu()

    def assert_stored(self, store: Any, device: str = "cpu") -> None:
        """Assert that `store` writes the reference's bytes and no others."""
        assert_same_buffers(self, self.stored(store, device), self.expected())


def assert_same_buffers(case: StoreCase, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bytes are equal, except for the payload of a NaN that is stored as a float.

    PyTorch's own payloads differ between CPU and GPU.
    """
    actual = actual.clone()
    for name in ("k_data", "v_data"):
        ours, theirs = (
            getattr(case.layout.views(case.pages(buffer)), name) for buffer in (actual, expected)
        )
        if ours.is_floating_point():
            bits = torch.int32 if ours.dtype == torch.float32 else torch.int16
            nan = ours.isnan() & theirs.isnan()
            ours.view(bits)[nan] = theirs.view(bits)[nan]
    differing = (actual != expected).nonzero()
    assert len(differing) == 0, f"{len(differing)} bytes differ, first {differing[:4].tolist()}"


def make_case(geometry: Geometry, seed: int = 0, **changes: Any) -> StoreCase:
    """Nasty values in every slot of `SLOTS` that the pages have; K and V in different dtypes."""
    layout = geometry.layout
    capacity = NUM_PAGES * layout.block_size
    slots = torch.tensor([slot if slot < capacity else slot % capacity for slot in SLOTS])
    slots = slots[: 4 if capacity < 40 else None]  # each slot once
    heads, count = layout.num_kv_heads, len(slots)
    key = nasty_values((count, heads, layout.head_size), seed)
    value = nasty_values((count, heads, layout.head_size_v), seed + 1)
    fields: dict[str, Any] = {
        "layout": layout,
        "key": key.to(INPUT_DTYPES[seed % 3]),
        "value": value.to(INPUT_DTYPES[(seed // 3) % 3]),
        "slots": slots,
        **changes,
    }
    return StoreCase(**fields)


def is_unquantized(geometry: Geometry) -> bool:
    """Whether K or V is stored as floats, which must be aligned."""
    return bool({geometry.k_dtype, geometry.v_dtype} & set(UNQUANTIZED))


def assert_every_value_stored(store: Any, k_dtype: str, x: torch.Tensor, k_scale: float) -> None:
    """Check one store of values `[n * 256]`, as K in one dtype and as V in another one."""
    v_dtype = {
        "fp8_e4m3": "fp8_e5m2",
        "nvfp4": "nvfp4_4over6",
        "mxfp4": "fp4_block16",
        "float16": "bfloat16",
    }[k_dtype]
    layout = PageLayout(k_dtype, v_dtype, 256, None, 1, 16)
    values = x.reshape(-1, 1, 256)
    slots = torch.arange(len(values))
    pages = -(-len(values) // 16)
    case = StoreCase(layout, values, values, slots, k_scale, 1.7 * k_scale, num_pages=pages)
    case.assert_stored(store)


def values_next_to_ties(k_dtype: str, count: int) -> Iterator[tuple[torch.Tensor, float]]:
    """Values `[4096]` whose quotients are ties of fp8_e4m3 or nvfp4, or next to one, and scales.

    Scales have significands of all ones, of 1, of the next, and `count` at random.
    """
    torch.manual_seed(4)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.5])
    if k_dtype == "fp8_e4m3":
        ties = torch.arange(17, 33, 2) / 16 * 2.0 ** torch.arange(-4, 4)
    for significand in [0x7FFFFF, 0, 1, *torch.randint(0, 2**23, (count,)).tolist()]:
        scale = torch.tensor(0x3C000000 | significand, dtype=torch.int32).view(torch.float32)
        codes = torch.randint(8, 0x7F, (256, 1, 1), dtype=torch.uint8)
        block_scales = codes.view(torch.float8_e4m3fn).float() if k_dtype == "nvfp4" else 1.0
        divisor = block_scales * scale
        products = (divisor * ties).expand(256, 2, 8)
        x = (products.contiguous().view(torch.int32) + torch.randint(-2, 3, (256, 2, 8))).int()
        x = x.view(torch.float32)
        if k_dtype == "nvfp4":
            x[:, 1, 7:] = 6 * divisor[:, 0]  # so that the block scale is the one wanted
        yield x.flatten(), float(scale)
