"""RMSNorm, SwiGLU and rotary embedding, whose launches overlap with those of their neighbours.

A step of few tokens has some 150 of these kernels, of a few µs each. They are launched before
the previous kernel has ended, prefetch what does not depend on it, and load once what does.
"""

from halfbyte.elementwise.ops import add_rms_norm, rms_norm, rotary_embedding, silu_and_mul

__all__ = ["add_rms_norm", "rms_norm", "rotary_embedding", "silu_and_mul"]
