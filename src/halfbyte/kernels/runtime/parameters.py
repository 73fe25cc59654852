"""What the launchers of C and CUDA kernels share in filling their parameters."""

from halfbyte.layouts import PageLayout

REGIONS = ("k_data", "k_scale", "v_data", "v_scale")
REGION_FIELDS = tuple(f"{name}{part}" for name in REGIONS for part in ("", "_token", "_head"))
"""Names of the numbers that say where a block-scaled page keeps what, in the sources' order."""


def region_fields(layout: PageLayout) -> dict[str, int]:
    """Bytes: offset in the page, stride of tokens and stride of heads, of each region.

    Formats without block scales have no such regions; their numbers are 0.
    """
    fields = dict.fromkeys(REGION_FIELDS, 0)
    for region in layout.regions:
        fields[region.name] = region.offset
        fields[f"{region.name}_token"] = region.token_stride
        fields[f"{region.name}_head"] = region.head_stride
    return fields
