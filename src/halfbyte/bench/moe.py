"""The MoE benchmark: 4-bit experts on halfbyte's kernels, bfloat16 experts on PyTorch's."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from halfbyte.bench.experts import Experts, MoeShape
from halfbyte.bench.products import ProductBenchmark, grid
from halfbyte.bench.report import Row, or_failed
from halfbyte.bench.timing import Call
from halfbyte.moe import MOE_BACKENDS

MOE_SHAPES = {
    "qwen3-30b-a3b": MoeShape(128, 8, 2048, 768),
    "gpt-oss-20b": MoeShape(32, 4, 2880, 2880, "mxfp4"),
}
_USUAL = {"cuda": tuple(MOE_SHAPES.values()), "cpu": (MoeShape(16, 4, 1024, 512),)}
TOKENS = {"cuda": (1, 4, 16, 64, 256, 1024, 8192), "cpu": (1, 4, 16, 64)}


class MoeBenchmark(ProductBenchmark):
    """Measures every shape with every number of tokens, and collects `report`.

    A row has `name`, `shape`, `m`, and under `subjects` by name: times, `error` and
    `allowed_error` (see `Experts.error`), `bytes` of the experts hit, `terabytes_per_s` and
    `fraction` of the machine's read bandwidth.

    Args:
        shapes: by default Qwen3-30B-A3B's and GPT-OSS-20B's, on a CPU a smaller one.
        tokens: M, each at least 1.
        backends: names of `MOE_BACKENDS`, by default halfbyte's own that run here;
            NoImplementationError for an unknown one, or one that cannot run.
        dtype: of x.
    """

    def __init__(
        self,
        device: torch.device,
        shapes: Sequence[MoeShape] = (),
        tokens: Sequence[int] = (),
        backends: Sequence[str] = (),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        cases = grid(shapes or _USUAL[device.type], tokens or TOKENS[device.type])
        configs = [shape.config(dtype, device) for shape, _ in cases]
        super().__init__(device, cases, MOE_BACKENDS, configs, backends, dtype)

    def run(self) -> Iterator[Row]:
        """Measure all cases; yields each row after adding it to the report."""
        experts = None
        for shape, m in self.cases:
            if experts is None or experts.shape != shape:
                experts = Experts(shape, self.device, self.dtype)
            x = experts.x(m)
            calls = {name: partial(experts.calls, name, x) for name in self.backends}
            subjects = {
                name: or_failed(partial(self._entry, experts, x, make, experts.bytes_hit(m)))
                for name, make in calls.items()
            }
            dense = partial(experts.dense_calls, x)
            subjects["dense_bf16"] = or_failed(partial(self.checked, experts, x, dense))
            row = {"name": f"{shape} M={m}", "shape": str(shape), "m": m, "subjects": subjects}
            self.report["microseconds"].append(row)
            yield row

    def _entry(
        self, experts: Experts, x: torch.Tensor, make: "partial[list[Call]]", num_bytes: int
    ) -> Row:
        entry = self.checked(experts, x, make)
        rate = num_bytes / entry["back_to_back"] / 1e6
        entry |= {"bytes": num_bytes, "terabytes_per_s": round(rate, 4)}
        entry["fraction"] = round(rate / self.report["read_terabytes_per_s"], 3)
        return entry
