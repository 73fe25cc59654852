"""Recipes: named transforms and roundings of K and V, for the same 4-bit formats.

K of a language model is hard to quantize to four bits for three reasons: more than half of its
energy is a constant per channel, which RoPE rotates with the position; some channels are outliers;
and the first token is an attention sink: its K differs from all others and gets a third of the
attention. `balanced` subtracts the constant (a mean per segment of positions, see `transform`),
applies a Hadamard transform to each head, chooses block scales by weighted error
(`numerics.weighted_rounding`), and keeps the first token and the last 64 in 16 bits (`recent`).
`accurate` also moves K's rounding errors to directions with little query energy. Bytes per token
are the same, and pages of `accurate` are read like those of `balanced`. `plain` is what other
programs read and write.
"""

from dataclasses import dataclass, replace

from halfbyte.layouts import KVCacheDType

SEGMENT = 64
"""Tokens that share a mean of K."""


@dataclass(frozen=True)
class KVRecipe:
    """How K and V become four bits. Fields combine freely; `RECIPES` has names for some.

    Args:
        center: subtract the mean of K before RoPE, with RoPE of the token's segment applied.
        rotate: multiply K by a Hadamard matrix, and Q when it is read.
        keep_first_token: read K and V at position 0 in the model's dtype, for the tokens that a
            calibration has seen there.
        four_over_six: choose each block's scale among two, by squared error: `nvfp4` is then stored
            as `nvfp4_4over6`.
        feedback: round K channel by channel and propagate each error to the later channels, by the
            second moment of the queries (as in GPTQ).
        weighted_scales: choose each block's scale of K and V among four, by squared error weighted
            by the queries (K) or the output projection (V); overrides `four_over_six`.
        recent_tokens: number of last tokens, up to 256, whose K and V are read in the model's
            dtype. They are packed as well, so that pages do not depend on it.
    """

    center: bool = False
    rotate: bool = False
    keep_first_token: bool = False
    four_over_six: bool = False
    feedback: bool = False
    weighted_scales: bool = False
    recent_tokens: int = 0

    def format_of(self, dtype: KVCacheDType) -> KVCacheDType:
        """The format to use for a requested one: the same bits, other choice of scales."""
        has_headroom = self.four_over_six or self.weighted_scales
        return KVCacheDType.NVFP4_4OVER6 if dtype.is_nvfp4 and has_headroom else dtype

    @property
    def changes_k(self) -> bool:
        """Whether writers and readers of K need a calibration."""
        changed = self.center or self.rotate or self.keep_first_token
        return changed or self.weighs_errors

    @property
    def weighs_errors(self) -> bool:
        """Whether K and V are rounded by an error weighted with a calibration's statistics."""
        return self.feedback or self.weighted_scales

    @property
    def of_pages(self) -> "KVRecipe":
        """The recipe without the fields that do not change the bytes of a page."""
        return replace(self, recent_tokens=0)

    @property
    def name(self) -> str:
        """Its name in `RECIPES`, else its fields."""
        for name, recipe in RECIPES.items():
            if recipe == self:
                return name
        named = {field: getattr(self, field) for field in self.__dataclass_fields__}
        parts = (f if value is True else f"{f}={value}" for f, value in named.items() if value)
        return "+".join(parts)

    @classmethod
    def parse(cls, name: "str | KVRecipe") -> "KVRecipe":
        """The recipe of a name.

        Raises:
            ValueError: an unknown name; the message lists the valid ones.
        """
        if isinstance(name, KVRecipe):
            return name
        if name not in tuple(RECIPES):  # may be unhashable
            raise ValueError(f"kv_recipe: unknown {name!r}; expected one of {', '.join(RECIPES)}")
        return RECIPES[name]


DEFAULT = "balanced"
"""The default recipe, where the scales have a calibration."""
_BALANCED = KVRecipe(
    center=True,
    rotate=True,
    keep_first_token=True,
    four_over_six=True,
    weighted_scales=True,
    recent_tokens=64,
)
RECIPES: dict[str, KVRecipe] = {
    "plain": KVRecipe(),
    "balanced": _BALANCED,
    "accurate": replace(_BALANCED, feedback=True),
}
