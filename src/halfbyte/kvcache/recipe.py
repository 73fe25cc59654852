"""What is done to K and V before they are packed: named recipes over the same four-bit formats.

K of a language model is hard to store in four bits for three reasons: more than half of its energy
is a constant per channel, which RoPE turns with the position; a few channels are much larger than
the others; and the first token's K is unlike all others and draws a third of the attention.
`balanced` takes the constant away (a mean per segment of positions, see `transform`), spreads what
is left over the channels of a head (a Hadamard transform), and keeps the first token and the last
64 in 16 bits (`recent`). `accurate` also rounds with care (`numerics.weighted_rounding`): what K is
off goes where queries do not look, and block scales are chosen by what an error costs. Pages have
the same bytes per token, and those of `accurate` are read as those of `balanced`. `plain` is what
other programs read and write.
"""

from dataclasses import dataclass, replace

from halfbyte.layouts import KVCacheDType

SEGMENT = 64
"""Tokens that share a mean of K."""


@dataclass(frozen=True)
class KVRecipe:
    """How K and V become four bits. Fields combine freely; `RECIPES` has names for some.

    Args:
        center: subtract the mean of K, measured before RoPE and turned to the token's segment.
        rotate: multiply K by a Hadamard matrix, and Q when it is read.
        keep_first_token: read K and V at position 0 in the model's dtype, for the tokens that a
            calibration has seen there.
        four_over_six: choose each block's scale among two, by squared error.
        feedback: round K channel by channel, and take what each is off out of those to come, by
            the second moment of the queries.
        weighted_scales: choose each block's scale of K and V among nine, by squared error weighted
            with what queries and the output projection make of it; goes before `four_over_six`.
        recent_tokens: read K and V of so many last tokens in the model's dtype, up to 256. They are
            packed as well when they come, so that pages do not depend on it.
    """

    center: bool = False
    rotate: bool = False
    keep_first_token: bool = False
    four_over_six: bool = False
    feedback: bool = False
    weighted_scales: bool = False
    recent_tokens: int = 0

    def format_of(self, dtype: KVCacheDType) -> KVCacheDType:
        """The format that stands for one that was asked for: the same bits, other scales."""
        has_headroom = self.four_over_six or self.weighted_scales
        return KVCacheDType.NVFP4_4OVER6 if dtype.is_nvfp4 and has_headroom else dtype

    @property
    def changes_k(self) -> bool:
        """Whether a calibration says how K is packed, so that writers and readers need it."""
        changed = self.center or self.rotate or self.keep_first_token
        return changed or self.weighs_errors

    @property
    def weighs_errors(self) -> bool:
        """Whether K and V are rounded by what a calibration says of queries and outputs."""
        return self.feedback or self.weighted_scales

    @property
    def of_pages(self) -> "KVRecipe":
        """What of it the bytes of a page depend on."""
        return replace(self, recent_tokens=0)

    @property
    def name(self) -> str:
        """Its name, or its fields where it has none."""
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
        if name not in RECIPES:
            raise ValueError(f"kv_recipe: unknown {name!r}; expected one of {', '.join(RECIPES)}")
        return RECIPES[name]


DEFAULT = "balanced"
"""The default recipe, where the scales have a calibration."""
_BALANCED = KVRecipe(
    center=True, rotate=True, keep_first_token=True, four_over_six=True, recent_tokens=64
)
RECIPES: dict[str, KVRecipe] = {
    "plain": KVRecipe(),
    "balanced": _BALANCED,
    "accurate": replace(_BALANCED, feedback=True, weighted_scales=True),
}
