"""The guide to new backends: its example runs, as a backend that is chosen by name only."""

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
GUIDE = (REPOSITORY / "docs" / "guides" / "backend.md").read_text()
REGISTER = """
from halfbyte.linear import LINEAR_BACKENDS

LINEAR_BACKENDS.register("unpacked", "unpacked:UnpackedKernel")
"""
CHECK = """
x, linear = torch.randn(5, 64), nn.Linear(64, 96)
ours, theirs = (NvFp4Linear.from_float(linear, backend=b)(x) for b in ("unpacked", "reference"))
torch.testing.assert_close(ours, theirs)
default = NvFp4Linear.from_float(linear)
default(x)
assert "unpacked" not in repr(default), default
"""


def test_example_of_a_linear_backend_runs(tmp_path: Path) -> None:
    module, _, usage, *_ = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    (tmp_path / "unpacked.py").write_text(module)
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", REGISTER + usage + CHECK],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "backend=unpacked" in done.stdout
    assert "torch.Size([3, 96])" in done.stdout
