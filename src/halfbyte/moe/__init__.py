"""Mixture-of-experts layers with 4-bit experts, by interchangeable kernels."""

from halfbyte.moe.base import MoeConfig, MoeKernel
from halfbyte.moe.experts import (
    GPT_OSS,
    SWIGLU,
    ExpertMatrices,
    GatedActivation,
    PackedExperts,
)
from halfbyte.moe.experts_layer import ExpertsLayer
from halfbyte.moe.interface import moe_experts
from halfbyte.moe.mxfp4_layer import MxFp4Experts
from halfbyte.moe.registry import MOE_BACKENDS, init_moe_kernel, select_moe_kernel
from halfbyte.moe.router import Routing, route, route_reference
from halfbyte.moe.separate_nvfp4 import NvFp4Experts

__all__ = [
    "GPT_OSS",
    "MOE_BACKENDS",
    "SWIGLU",
    "ExpertMatrices",
    "ExpertsLayer",
    "GatedActivation",
    "MoeConfig",
    "MoeKernel",
    "MxFp4Experts",
    "NvFp4Experts",
    "PackedExperts",
    "Routing",
    "init_moe_kernel",
    "moe_experts",
    "route",
    "route_reference",
    "select_moe_kernel",
]
