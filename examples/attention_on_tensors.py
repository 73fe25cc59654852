"""Attention on plain tensors: K and V go to packed 4-bit pages, queries read them back.

    python examples/attention_on_tensors.py

No model and no engine: the functions that engines call.
"""

import torch

from halfbyte.attention import paged_attention
from halfbyte.kvcache import PageLayout, reshape_and_cache
from halfbyte.numerics import nvfp4

HEADS, KV_HEADS, HEAD_SIZE, TOKENS, PAGE = 8, 2, 128, 200, 16


def main() -> float:
    """Returns the error of attention on an NVFP4 cache, relative to float32 K and V."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator(device).manual_seed(0)
    key, value = torch.randn(2, TOKENS, KV_HEADS, HEAD_SIZE, generator=random, device=device)
    query = torch.randn(1, HEADS, HEAD_SIZE, generator=random, device=device)

    # A layout says where every byte of a page lies; pages are rows of a uint8 tensor.
    layout = PageLayout("nvfp4", "nvfp4", HEAD_SIZE, None, KV_HEADS, PAGE)
    num_pages = -(-TOKENS // PAGE)
    pages = torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8, device=device)

    # One global scale each for K and V, from the largest magnitude.
    k_scale, v_scale = (float(nvfp4.global_scale_from_amax(x.abs().amax())) for x in (key, value))
    slots = torch.arange(TOKENS, device=device)  # slot = page * block_size + offset
    reshape_and_cache(key, value, pages, slots, layout, k_scale, v_scale)

    out = paged_attention(
        query,
        pages,
        layout=layout,
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([TOKENS], dtype=torch.int32, device=device),
        block_tables=torch.arange(num_pages, dtype=torch.int32, device=device)[None],
        scale=HEAD_SIZE**-0.5,
        k_scale=k_scale,
        v_scale=v_scale,
    )

    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    error = float((out - exact.transpose(0, 1)).norm() / exact.norm())
    print(
        f"{layout.bytes_per_token:.0f} bytes per token, {2 * KV_HEADS * HEAD_SIZE * 2} in bfloat16"
    )
    print(f"relative error of the output: {error:.3f}")
    return error


if __name__ == "__main__":
    main()
