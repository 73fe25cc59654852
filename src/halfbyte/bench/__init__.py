"""Benchmarks: halfbyte beside its peers, the same work timed in the same way in the same run."""

from halfbyte.bench.attention import Benchmark, Report
from halfbyte.bench.cases import CPU_CASES, GPU_CASES, PRESETS, Case, grid, select
from halfbyte.bench.linear import LinearBenchmark
from halfbyte.bench.linear_bounds import bounds
from halfbyte.bench.linear_cases import parse_shapes
from halfbyte.bench.linear_report import linear_markdown_table, linear_tables, to_json
from halfbyte.bench.report import console_tables, markdown_table

__all__ = [
    "CPU_CASES",
    "GPU_CASES",
    "PRESETS",
    "Benchmark",
    "Case",
    "LinearBenchmark",
    "Report",
    "bounds",
    "console_tables",
    "grid",
    "linear_markdown_table",
    "linear_tables",
    "markdown_table",
    "parse_shapes",
    "select",
    "to_json",
]
