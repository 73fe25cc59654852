"""Identity of pages: what must be equal for one engine to read another's pages.

A page has its codes and block scales, but not its format, global scales and the recipe's transform
of K, which are common to all pages of a layer. Pages read with other ones would decode to wrong
values without any error.
"""

import hashlib
import json
from typing import Any

from halfbyte.kvcache.plan import KVCachePlan
from halfbyte.kvcache.recipe import KVRecipe
from halfbyte.kvcache.scales import KVScales
from halfbyte.layouts import KVCacheDType
from halfbyte.numerics.weighted_rounding import CANDIDATES

_VERSION = 1


def plan_identity(
    plan: KVCachePlan, scales: KVScales | None, recipe: KVRecipe | None = None
) -> str:
    """As `pages_identity`, of every layer's layout; for pools of layers with different formats."""
    layouts = [
        repr(plan.groups[group].specs[index].layout)
        for group, index in map(plan.locate, range(plan.num_layers))
    ]
    return pages_identity(";".join(layouts), "", scales, recipe)


def pages_identity(
    k_dtype: KVCacheDType | str,
    v_dtype: KVCacheDType | str,
    scales: KVScales | None,
    recipe: KVRecipe | None = None,
) -> str:
    """A hex SHA-256 of formats, recipe and every layer's scales, but not of their source.

    Args:
        k_dtype, v_dtype: formats.
        scales: None where no format has a global scale.
        recipe: by default `plain`.
    """
    fields: dict[str, Any] = {
        "version": _VERSION,
        "k": str(k_dtype),
        "v": str(v_dtype),
        # `float.hex` is exact.
        "k_amax": scales and [float(amax).hex() for amax in scales.k_amax],
        "v_amax": scales and [float(amax).hex() for amax in scales.v_amax],
    }
    if recipe is not None and recipe.changes_k:
        fields["recipe"] = recipe.of_pages.name
        fields["calibration"] = scales and scales.calibration and scales.calibration.sha256()
        if recipe.weighted_scales:
            fields["candidates"] = CANDIDATES
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
