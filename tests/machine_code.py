"""Machine code of CUDA kernels as text, and checks of it."""

import re
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

from halfbyte.kernels.runtime.nvrtc import Program


def compiled(name: str, macros: dict[str, int | None], architecture: str) -> bytes:
    """The cubin of a source; arguments as of `Program.of`. Needs no GPU."""
    return Program.of(name, macros, architecture).compiled()


def disassembled(cubin: bytes, folder: Path) -> str:
    """By the disassembler that Triton brings; `folder` is for a file."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.exists():
        pytest.skip("needs nvdisasm")
    (folder / "kernel.cubin").write_bytes(cubin)
    command = [str(tool), "-c", str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def stack_bytes(cubin: bytes) -> int:
    """Stack of a thread of the only kernel; more than a few bytes are spilled registers."""
    return used(cubin, "STACK")


def used(cubin: bytes, resource: str) -> int:
    """What the only kernel uses of a resource, by its name in `cuobjdump -res-usage`."""
    triton = pytest.importorskip("triton")
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        cuobjdump = triton.knobs.nvidia.cuobjdump.path
        printed = subprocess.check_output([cuobjdump, "-res-usage", file.name], text=True)
    found = re.search(rf"\b{resource}:(\d+)", printed)
    assert found is not None, printed
    return int(found[1])


def assert_copies_have_descriptors(code: str) -> None:
    """ptxas 13.0 sometimes reads the cache policy from a register that is never written."""
    used = set(re.findall(r"LDGSTS\S* .*desc\[(UR\d+)\]", code))
    written = set(re.findall(r" (?:U[A-Z]|R2UR|S2UR)\S* +(UR\d+),", code))
    assert used
    assert used <= written
