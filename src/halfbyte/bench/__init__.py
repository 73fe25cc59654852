"""Benchmarks: halfbyte beside its peers, the same work timed in the same way in the same run."""

from halfbyte.bench.attention import Benchmark, Report
from halfbyte.bench.cases import CPU_CASES, GPU_CASES, PRESETS, Case, grid, select
from halfbyte.bench.report import console_tables, markdown_table

__all__ = [
    "CPU_CASES",
    "GPU_CASES",
    "PRESETS",
    "Benchmark",
    "Case",
    "Report",
    "console_tables",
    "grid",
    "markdown_table",
    "select",
]
