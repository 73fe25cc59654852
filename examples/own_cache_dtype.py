"""Your own cache dtype: NF4's codes and E5M2 block scales, in four and a half bits.

    python examples/own_cache_dtype.py

It replaces `fp4_block16`, which has the same page layout; docs/guides/format.md adds a new name.
"""

import torch
from torch import Tensor

from halfbyte import kvcache

# Quantiles of a normal distribution (QLoRA, arXiv 2305.14314, appendix E), ascending.
CODES = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
CODES += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0]


class NF4(kvcache.KVCacheQuantMethod):
    SCALE_BLOCK_SIZE = 16

    def quantize(self, x: Tensor, global_scale: float | Tensor) -> tuple[Tensor, Tensor]:
        blocks = x.float().unflatten(-1, (-1, 16))
        scales = blocks.abs().amax(-1).clamp(2**-14, 57344).to(torch.float8_e5m2)
        codes = torch.tensor(CODES, device=x.device)
        distance = (blocks / scales.float()[..., None]).unsqueeze(-1) - codes
        nearest = distance.abs().argmin(-1).flatten(-2).to(torch.uint8)
        return nearest[..., ::2] | nearest[..., 1::2] << 4, scales.view(torch.uint8)

    def dequantize(
        self, data: Tensor, scales: Tensor | None, global_scale: float | Tensor, dtype: torch.dtype
    ) -> Tensor:
        assert scales is not None
        codes = torch.stack((data & 15, data >> 4), -1).flatten(-2)
        values = torch.tensor(CODES, device=data.device)[codes.long()].unflatten(-1, (-1, 16))
        return (values * scales.view(torch.float8_e5m2).float()[..., None]).flatten(-2).to(dtype)

    def global_scale_from_amax(self, amax: float) -> float:
        return 1.0


def main() -> float:
    """The relative error of normally distributed keys that were stored and read back."""
    kvcache.KV_CACHE_QUANT_REGISTRY["fp4_block16"] = NF4
    layout = kvcache.PageLayout(
        "fp4_block16", "fp4_block16", 64, None, num_kv_heads=2, block_size=16
    )
    key, value = torch.randn(2, 64, 2, 64, generator=torch.Generator().manual_seed(0))
    pages, slots = torch.zeros(4, layout.page_bytes, dtype=torch.uint8), torch.arange(64)
    kvcache.reshape_and_cache(key, value, pages, slots, layout, 1.0, 1.0, backend="reference")
    read, _ = kvcache.read_tokens(pages, slots, layout, 1.0, 1.0)
    error = float((read - key).norm() / key.norm())
    print(f"relative error: {error:.4f}")
    return error


if __name__ == "__main__":
    main()
