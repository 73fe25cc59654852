"""Benchmarks of halfbyte's kernels and PyTorch's, timed the same way in the same run."""

from halfbyte.bench.attention import AttentionBenchmark
from halfbyte.bench.cases import Case
from halfbyte.bench.linear import LinearBenchmark
from halfbyte.bench.moe import MOE_SHAPES, MoeBenchmark, MoeShape

__all__ = [
    "MOE_SHAPES",
    "AttentionBenchmark",
    "Case",
    "LinearBenchmark",
    "MoeBenchmark",
    "MoeShape",
]
