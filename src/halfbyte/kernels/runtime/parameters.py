"""Kernel parameters that the launchers of C++ and CUDA kernels share."""

from halfbyte.layouts import PageLayout

REGIONS = ("k_data", "k_scale", "v_data", "v_scale")
REGION_FIELDS = tuple(f"{name}{part}" for name in REGIONS for part in ("", "_token", "_head"))
"""Names of the region fields of a block-scaled page, in the order of the C++ structs."""


def region_fields(layout: PageLayout) -> dict[str, int]:
    """Offset in the page, stride of tokens and stride of heads of each region, in bytes.

    All 0 for formats without block scales.
    """
    fields = dict.fromkeys(REGION_FIELDS, 0)
    for region in layout.regions:
        fields[region.name] = region.offset
        fields[f"{region.name}_token"] = region.token_stride
        fields[f"{region.name}_head"] = region.head_stride
    return fields
