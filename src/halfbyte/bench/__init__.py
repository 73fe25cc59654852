"""Benchmarks of halfbyte's kernels and PyTorch's, timed the same way in the same run."""

from halfbyte.bench.attention import AttentionBenchmark
from halfbyte.bench.cases import CPU_CASES, GPU_CASES, Case
from halfbyte.bench.experts import MoeShape
from halfbyte.bench.linear import LinearBenchmark
from halfbyte.bench.moe import MOE_SHAPES, MoeBenchmark

__all__ = [
    "CPU_CASES",
    "GPU_CASES",
    "MOE_SHAPES",
    "AttentionBenchmark",
    "Case",
    "LinearBenchmark",
    "MoeBenchmark",
    "MoeShape",
]
