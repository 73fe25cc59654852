"""Benchmarks of halfbyte's kernels and PyTorch's, timed the same way in the same run."""

from halfbyte.bench.attention import AttentionBenchmark
from halfbyte.bench.cases import CPU_CASES, GPU_CASES, Case
from halfbyte.bench.linear import LinearBenchmark

__all__ = ["CPU_CASES", "GPU_CASES", "AttentionBenchmark", "Case", "LinearBenchmark"]
