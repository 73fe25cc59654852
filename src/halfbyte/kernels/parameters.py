"""What the launchers of C and CUDA kernels share in filling their parameters."""

from halfbyte.layouts import PageLayout

REGIONS = ("k_data", "k_scale", "v_data", "v_scale")
REGION_FIELDS = tuple(f"{name}{part}" for name in REGIONS for part in ("", "_token", "_head"))
"""Names of the numbers that say where a block-scaled page keeps what, in the sources' order."""


def region_fields(layout: PageLayout) -> dict[str, int]:
    """Bytes: offset in the page, stride of tokens and stride of heads, of each region."""
    regions = {region.name: region for region in layout.regions}
    values = [
        value
        for name in REGIONS
        for value in (regions[name].offset, regions[name].token_stride, regions[name].head_stride)
    ]
    return dict(zip(REGION_FIELDS, values, strict=True))
