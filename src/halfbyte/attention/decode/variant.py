"""Compile-time variants of the decode kernel: how one is chosen, and which layouts have none."""

from functools import lru_cache
from typing import NamedTuple

import torch

from halfbyte.attention.decode.recipe import NO_RECIPE, RecipeVariant
from halfbyte.kernels.runtime.occupancy import RESERVED_BYTES
from halfbyte.kernels.runtime.parameters import region_fields
from halfbyte.layouts import KVCacheDType, PageLayout
from halfbyte.layouts.formats import KV_FORMATS

_DTYPE_MACROS = {
    torch.bfloat16: "Q_BF16",
    torch.float16: "Q_FP16",
}
"""Queries enter the matmul as fp16 times a power of two: exact for these two, not for float32."""
_KINDS = {
    KVCacheDType(name): row.cuda_id for name, row in KV_FORMATS.items() if row.cuda_id is not None
}
"""`K_KIND` and `V_KIND` of `formats.cuh`."""

# Shared memory per SM in KiB (CUDA C++ Programming Guide, "Technical Specifications"). A CTA can
# use 1 KiB less, and each CTA reserves 1 KiB.
_SHARED_KIB = {80: 164, 87: 164, 90: 228, 100: 228, 103: 228}
_MIN_SHARED_KIB = 100
_RING_BYTES = 27 * 1024
"""Max size of a warp's stages. Twice the size at half the warps is no faster."""
_NVFP4_RINGS = ((64, 2), (32, 2), (16, 2))
_RINGS = ((64, 4), (64, 3), (32, 4), (32, 3), (16, 3), (32, 2), (16, 2))
"""(tokens per tile, stages), best first."""
WARPS = 4
"""Per CTA."""


class DecodeVariant(NamedTuple):
    """Compile-time options; see the headers of `decode.cu` and `decode_wgmma.cu`."""

    tile: int
    n_tiles: int
    duplicate: bool
    q_shared: bool
    stages: int
    ctas: int
    wgmma: bool = False
    """`decode_wgmma.cu`: all warps of a CTA work on one unit, instead of one unit each."""
    whole_pages: bool = False
    """`pages.cuh`: TMA copies whole pages (one KV head per page)."""
    means: bool = False
    """K is centred: shared memory has biases."""
    kept_pairs: int = 0
    """Channel pairs whose coefficients `means.cuh` keeps in shared memory; 0 for none."""
    keeps_angles: bool = False
    """`means.cuh` copies the angles of the next 16 segments to shared memory ahead of time."""
    keeps_query: bool = False
    """`decode_wgmma.cu` keeps q as it was loaded, for the keys of `keys.cuh`."""

    @property
    def source(self) -> str:
        """Path of the kernel source in the package."""
        return f"attention/decode/{'decode_wgmma' if self.wgmma else 'decode'}.cu"

    @property
    def units_per_cta(self) -> int:
        """Units that a CTA processes concurrently."""
        return 1 if self.wgmma else WARPS

    @property
    def columns(self) -> int:
        """Query columns per work item."""
        return 4 if self.duplicate else 8 * self.n_tiles

    def cta_bytes(self, layout: PageLayout) -> int:
        """Shared memory per CTA in bytes: rings, q if kept there, exchange between warps."""
        ring = self.stages * stage_bytes(layout, self.tile)
        q = self.n_tiles * layout.head_size * 16 if self.q_shared else 0
        if self.wgmma:
            chunks = max(1, layout.head_size_v // 128)  # of 32 dims, per warp
            scales = WARPS * chunks * self.tile * 4
            barriers = 8 * self.stages if self.whole_pages else 0
            biases = self.columns * (self.tile // 16 + 64 * self.means)
            exchange = self.columns * (2 * self.tile + 4 * WARPS + 8)
            return ring + q * (1 + self.keeps_query) + exchange + scales + biases + barriers
        means = self.columns * (8 * self.kept_pairs + 64 * self.means)
        angles = 16 * 8 * self.kept_pairs * self.keeps_angles
        return WARPS * (ring + q + means + angles)

    def fits(self, layout: PageLayout, compute_capability: int) -> bool:
        """Whether `ctas` CTAs fit in the shared memory of an SM."""
        shared = _SHARED_KIB.get(compute_capability, _MIN_SHARED_KIB) * 1024
        return self.ctas * (self.cta_bytes(layout) + RESERVED_BYTES) <= shared


def unsupported_reason(layout: PageLayout, query_dtype: torch.dtype) -> str | None:
    """Why the kernel cannot read a layout; None if it can."""
    for name, dtype in (("K", layout.k_dtype), ("V", layout.v_dtype)):
        if dtype not in _KINDS:
            return f"reads nvfp4, fp8 and 16-bit caches, not {name} in {dtype}"
        if not dtype.is_quantized and dtype.storage_dtype != query_dtype:
            return f"reads {name} in {dtype} for queries of that dtype, not {query_dtype}"
    if {layout.head_size, layout.head_size_v} - {64, 128, 256}:
        return f"head sizes 64, 128 and 256, not {layout.head_size} and {layout.head_size_v}"
    if layout.block_size % 16:
        return f"pages of a multiple of 16 tokens, not {layout.block_size}"
    if layout.v_scale_layout != "linear":
        return f"linear V scales, not {layout.v_scale_layout}"
    if query_dtype not in _DTYPE_MACROS:
        return f"query in bfloat16 or float16, not {query_dtype}"
    return None


@lru_cache(maxsize=1024)
def choose_variant(
    layout: PageLayout,
    group: int,
    mean_queries: float,
    batch_invariant: bool,
    compute_capability: int,
    recipe: RecipeVariant = NO_RECIPE,
) -> DecodeVariant | None:
    """The fastest known variant for the work on a GPU; None if shared memory is too small.

    Eight warps per SM saturate the bandwidth of an H200 and leave 255 registers per thread; more
    warps measured the same or slower. With fp8 and 16-bit caches they need rings of 24 KiB. nvfp4
    takes more work per byte; there two tiles of at most 18 KiB are up to 6 % faster, because
    other loads queue behind fewer bytes.

    Args:
        layout: of the pages.
        group: query heads per KV head.
        mean_queries: query tokens per sequence.
        batch_invariant: ignore `mean_queries`, which depends on the batch.
        compute_capability: as `dispatch` counts, such as 90.
        recipe: some need shared memory for means of K, or for q as it was loaded.
    """
    columns = group if batch_invariant else group * max(1.0, mean_queries)
    nvfp4 = layout.k_dtype.is_nvfp4 and layout.v_dtype.is_nvfp4
    duplicate = nvfp4 and columns <= 4 and not batch_invariant
    head_size = max(layout.head_size, layout.head_size_v)
    # More columns share the unpacking; registers and shared memory limit their number.
    wanted = 1 if columns <= 8 else 2 if columns <= 16 or head_size > 128 else 4
    if compute_capability == 90 and nvfp4 and columns > 16:
        return _wgmma_variant(layout, columns, head_size, recipe)
    variants = [
        DecodeVariant(
            *(tile, n, duplicate, _shares_q(n, head_size), stages, ctas),
            means=recipe.pairs > 0,
            kept_pairs=pairs,
            keeps_angles=angles,
        )
        for ctas in (2, 1)
        for n in (wanted, 2, 1)
        for tile, stages in (_NVFP4_RINGS if nvfp4 else _RINGS)
        if tile <= _max_tile_tokens(n, head_size, nvfp4)
        # Angles that are waited for, and coefficients that are computed again, cost less than a
        # smaller tile.
        for pairs, angles in dict.fromkeys(
            ((recipe.pairs, recipe.pairs > 0), (recipe.pairs, False), (0, False))
        )
    ]
    for variant in variants:
        ring_fits = (
            variant.ctas == 1 or variant.stages * stage_bytes(layout, variant.tile) <= _RING_BYTES
        )
        if ring_fits and variant.fits(layout, compute_capability):
            return variant
    return None


def _shares_q(n_tiles: int, head_size: int) -> bool:
    """Whether q does not fit in registers and is kept in shared memory."""
    return n_tiles * max(64, head_size) > 256


def _max_tile_tokens(n_tiles: int, head_size: int, nvfp4: bool) -> int:
    """Max tokens per tile whose logits fit in registers; 16 was measured for nvfp4 only."""
    if n_tiles == 1 and head_size <= 128:
        return 64
    return 16 if nvfp4 and _shares_q(n_tiles, head_size) else 32


def _wgmma_variant(
    layout: PageLayout, columns: float, head_size: int, recipe: RecipeVariant
) -> DecodeVariant:
    """The `wgmma` variant, with as many CTAs per SM as its accumulators leave registers for."""
    n_tiles = 4 if columns <= 32 else 8
    max_ctas = 3 if n_tiles == 4 and head_size <= 128 else 2
    whole = _pages_like_tiles(layout)
    variants = (
        DecodeVariant(
            *(tile, n_tiles, False, True, stages, ctas, True, whole),
            means=recipe.pairs > 0,
            keeps_query=keeps,
        )
        for ctas in range(max_ctas, 0, -1)
        for tile, stages in ((128, 2), (64, 3))
        for keeps in dict.fromkeys((recipe.has_keys, False))
    )
    return next(variant for variant in variants if variant.fits(layout, 90))


def _pages_like_tiles(layout: PageLayout) -> bool:
    """Whether an nvfp4 page has one KV head, equal row sizes of K and V, and divides 64 tokens."""
    one_head = layout.num_kv_heads == 1 and layout.head_size == layout.head_size_v
    return one_head and layout.block_size in (16, 32, 64)


def stage_bytes(layout: PageLayout, tile: int) -> int:
    """Shared memory of one tile of K and V with their scales."""
    sides = ((layout.k_dtype, layout.head_size), (layout.v_dtype, layout.head_size_v))
    return tile * sum(d.data_bytes(size) + d.scale_bytes(size) for d, size in sides)


def geometry_macros(
    layout: PageLayout, group: int, dtype: torch.dtype, softcap: bool
) -> dict[str, int | None]:
    """Macros common to all kernels that read queries and pages."""
    return {
        "HEAD_SIZE": layout.head_size,
        "HEAD_SIZE_V": layout.head_size_v,
        "KV_HEADS": layout.num_kv_heads,
        "GROUP": group,
        "SOFTCAP": int(softcap),
        _DTYPE_MACROS[dtype]: None,
        **{name.upper(): value for name, value in region_fields(layout).items()},
    }


def macros(
    layout: PageLayout,
    group: int,
    dtype: torch.dtype,
    softcap: bool,
    variant: DecodeVariant,
) -> dict[str, int | None]:
    """Macros of `decode.cu`, `decode_wgmma.cu` and `merge.cu`, without a recipe.

    `RecipeVariant.macros` has those that differ with one.
    """
    return {
        **geometry_macros(layout, group, dtype, softcap),
        "K_KIND": _KINDS[layout.k_dtype],
        "V_KIND": _KINDS[layout.v_dtype],
        "BLOCK_SIZE": layout.block_size,
        **NO_RECIPE.macros(),
        # In HND the tokens of a head are contiguous, so every copy has 16 bytes. The same holds
        # for NHD with a single head.
        "HND": int(layout.order == "HND" or layout.num_kv_heads == 1),
        "WHOLE_PAGES": int(variant.whole_pages),
        "TILE": variant.tile,
        "WARPS": WARPS,
        "STAGES": variant.stages,
        "CTAS": variant.ctas,
        "N_TILES": variant.n_tiles,
        "DUPLICATE": int(variant.duplicate),
        "COLS": variant.columns,
        "Q_SHARED": int(variant.q_shared),
        "KEEPS_COEFFICIENTS": int(variant.kept_pairs > 0),
        "KEEPS_ANGLES": int(variant.keeps_angles),
        "KEEPS_QUERY": int(variant.keeps_query),
    }
