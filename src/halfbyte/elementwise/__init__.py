"""RMSNorm, SwiGLU and rotary embedding, whose launches overlap with those of their neighbours.

A decode step of Llama-3.1-8B has 129 of these kernels, of a few µs each. They are launched before
the previous kernel has ended, and load or prefetch weights and angles before they wait for it.
"""

from halfbyte.elementwise.norms import add_rms_norm, rms_norm, silu_and_mul
from halfbyte.elementwise.rotary import qk_norm_rotary_embedding, rotary_embedding

__all__ = [
    "add_rms_norm",
    "qk_norm_rotary_embedding",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
]
