"""CUDA sources on the CPU: compiled by a C++ compiler as they are, but for inline assembly.

`cuda_on_host.h` has the part of CUDA that they need. Every `asm` statement becomes the C++ that
stands for its text in `_ASSEMBLY`, most of it in `cuda_on_host_ptx.h`, `cuda_on_host_wgmma.h` and
`cuda_on_host_bulk.h`; a source with another one is refused.
"""

import ctypes
import mmap
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.kernels import nvrtc

SOURCES = Path(nvrtc.__file__).parent
_HEADER = Path(__file__).with_name("cuda_on_host_bulk.h")
_COMPILER = shutil.which("c++") or shutil.which("g++")
_OPTIONS = (
    *("-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off"),
    "-fno-strict-aliasing",  # vectors are read from arrays of scalars, as CUDA allows
    "-fvisibility=hidden",  # keeps apart what several libraries define alike
    "-U_FORTIFY_SOURCE",  # whose longjmp refuses to go to another stack, as fibers do
)

needs_compiler = pytest.mark.skipif(
    _COMPILER is None or sys.platform != "linux", reason="needs a C++ compiler, on Linux"
)

_HERE = "cuda_on_host::"
_MATMULS = {
    "MATMUL": "MATMUL",  # a macro of the source
    **{
        text: f'"{text}"'
        for text in (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        )
    },
}
"""Instructions, and what C++ calls their texts."""


def _wgmma(columns: int) -> str:
    """Text of a matmul of halves with so many columns; its C++ goes by the names around it."""
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    return (
        f"{{.reg .pred p; setp.ne.b32 p, %{count + 5}, 0;"
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 {{{sums}}}, {{{a}}}, "
        f"%{count + 4}, p, 1, 1, 0;}}"
    )


_ASSEMBLY = {
    "": "",
    "ex2.approx.ftz.f32 %0, %1;": f"%0 = {_HERE}flush(std::exp2({_HERE}flush(%1)))",
    "rcp.approx.ftz.f32 %0, %1;": f"%0 = {_HERE}approximate_inverse(%1)",
    "cvt.rn.bf16x2.f32 %0, %1, %2;": f"%0 = {_HERE}to_bfloat16(%1) << 16 | {_HERE}to_bfloat16(%2)",
    "cvt.rn.f16x2.f32 %0, %1, %2;": f"%0 = {_HERE}to_float16(%1) << 16 | {_HERE}to_float16(%2)",
    "cvt.f32.f16 %0, %1;": f"%0 = {_HERE}of_float16(%1)",
    "mul.bf16x2 %0, %1, %2;": f"%0 = {_HERE}fma_bfloat16x2(%1, %2, 0x80008000u)",
    "fma.rn.bf16x2 %0, %1, %2, %3;": f"%0 = {_HERE}fma_bfloat16x2(%1, %2, %3)",
    "mul.f16x2 %0, %1, %2;": f"%0 = {_HERE}multiply_float16x2(%1, %2)",
    "{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}": (
        "%0 = (%1 & 0xFFFF) * 0x10001u"
    ),
    "{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}": (
        "%0 = (%1 >> 16) * 0x10001u"
    ),
    "cvt.rn.f16x2.e4m3x2 %0, %1;": f"%0 = {_HERE}of_e4m3x2(%1)",
    # The table of a function of three bits: here the third chooses among the others.
    "lop3.b32 %0, %1, %2, %3, 0xe4;": "%0 = (%1 & %3) | (%2 & ~%3)",
    "max.f16x2 %0, %1, %2;": f"%0 = {_HERE}max_float16x2(%1, %2)",
    "mov.b64 %0, {%1, %2};": "%0 = (unsigned long long)(unsigned)(%2) << 32 | (unsigned)(%1)",
    "shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;": (
        f"%0 = {_HERE}shuffle(~0u, %1, %2, __LINE__)"
    ),
    "mad.wide.u32 %0, %1, %2, %3;": "%0 = (unsigned long long)%1 * %2 + %3",
    "ld.global.f32 %0, [%1];": "%0 = *(const float*)(%1)",
    "ld.global.u32 %0, [%1];": "%0 = *(const unsigned*)(%1)",
    "ld.global.v2.u32 {%0, %1}, [%2];": f"{_HERE}unpack(*(const uint2*)(%2), %0, %1)",
    "ld.global.v4.u32 {%0, %1, %2, %3}, [%4];": (
        f"{_HERE}unpack(*(const uint4*)(%4), %0, %1, %2, %3)"
    ),
    "ld.shared.f32 %0, [%1];": f"%0 = {_HERE}load<float>(%1)",
    "ld.shared.u32 %0, [%1];": f"%0 = {_HERE}load<unsigned>(%1)",
    "ld.shared.v2.u32 {%0, %1}, [%2];": f"{_HERE}unpack({_HERE}load<uint2>(%2), %0, %1)",
    "ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];": (
        f"{_HERE}unpack({_HERE}load<uint4>(%4), %0, %1, %2, %3)"
    ),
    "ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];": (
        f"{_HERE}unpack({_HERE}load<float4>(%4), %0, %1, %2, %3)"
    ),
    "{.reg .u16 x; ld.shared.u16 x, [%1]; cvt.u32.u16 %0, x;}": (
        f"%0 = {_HERE}load<unsigned short>(%1)"
    ),
    "st.shared.f32 [%0], %1;": f"{_HERE}store<float>(%0, %1)",
    "st.shared.u32 [%0], %1;": f"{_HERE}store<unsigned>(%0, %1)",
    "st.shared.v2.u32 [%0], {%1, %2};": f"{_HERE}store<uint2>(%0, {{%1, %2}})",
    "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;": f"{_HERE}copy(%0, %1, 16, 16)",
    "cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 4, %2;": f"{_HERE}copy(%0, %1, 4, 4)",
    "cp.async.cg.shared.global [%0], [%1], 16, %2;": f"{_HERE}copy(%0, %1, 16, %2)",
    "cp.async.cg.shared.global [%0], [%1], 16;": f"{_HERE}copy(%0, %1, 16, 16)",
    "cp.async.ca.shared.global [%0], [%1], 4;": f"{_HERE}copy(%0, %1, 4, 4)",
    "{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}": (
        f"if (%2) {_HERE}copy(%0, %1, 16, 16)"
    ),
    "cp.async.commit_group;": f"{_HERE}commit_group()",
    "cp.async.wait_group %0;": f"{_HERE}wait_group(%0)",
    "cp.async.wait_all;": f"{_HERE}wait_all()",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];": (
        f"{_HERE}load_matrices(%0, %1, %2, %3, %4)"
    ),
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];": (
        f"{_HERE}load_transposed_matrices(%0, %1, %2, %3, %4)"
    ),
    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};": (
        f"{_HERE}store_transposed_matrices(%0, %1, %2, %3, %4)"
    ),
    "movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;": f"%0 = {_HERE}transpose(%1)",
    **{
        f"{instruction} {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};": (
            f"{_HERE}multiply_matrices({text}, %0, %1, %2, %3, %4, %5, %6, %7, %8, %9)"
        )
        for instruction, text in _MATMULS.items()
    },
    **{_wgmma(columns): f"{_HERE}wgmma({columns}, &d[0][0], a, b, add)" for columns in (32, 64)},
    # Of linear_wide.cu, whose macros stand for themselves here.
    "{.reg .pred p; setp.ne.b32 p, ADD , 0;wgmma.mma_async.sync.alignedWGMMA WGMMA_TYPES }": (
        f"{_HERE}wgmma(TOKENS, d, a, b, add, X_BF16)"
    ),
    "wgmma.fence.sync.aligned;": "",
    "wgmma.commit_group.sync.aligned;": f"{_HERE}commit_matmuls()",
    "wgmma.wait_group.sync.aligned %0;": f"{_HERE}wait_for_matmuls(%0)",
    "fence.proxy.async.shared::cta;": "",
    "setmaxnreg.dec.sync.aligned.u32 %0;": "",
    "setmaxnreg.inc.sync.aligned.u32 %0;": "",
    "mov.u32 %0, %%tid.x;": "%0 = threadIdx.x",
    "mov.u32 %0, %%cluster_ctarank;": f"%0 = {_HERE}cluster_rank()",
    "mapa.shared::cluster.u32 %0, %1, %2;": f"%0 = {_HERE}map_to_rank(%1, %2)",
    "mbarrier.arrive.shared::cluster.b64 _, [%0];": f"{_HERE}arrive_mapped(%0)",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];": (
        f"{_HERE}copy_bulk(%0, %1, %2, %3)"
    ),
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;": (
        f"{_HERE}copy_box(%0, %1, %2, %3, %4, %5)"
    ),
    "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];": (
        f"{_HERE}store_box(%0, %1, %2, %3)"
    ),
    "cp.async.bulk.commit_group;": "",
    "cp.async.bulk.wait_group.read 0;": f"{_HERE}wait_for_stores()",
    "bar.sync %0, 128;": f"{_HERE}meet(%0, 128, true, false)",
    "bar.sync %0, 160;": f"{_HERE}meet(%0, 160, true, false)",
    "bar.arrive %0, 160;": f"{_HERE}meet(%0, 160, false, false)",
    "{.reg .pred p, q; setp.ne.u32 q, %1, 0; bar.red.or.pred p, %2, 128, q; "
    "selp.u32 %0, 1, 0, p;}": f"%0 = {_HERE}meet(%2, 128, true, %1)",
    "st.relaxed.gpu.global.u64 [%0], %1;": "*(%0) = %1",
    "st.release.gpu.global.u64 [%0], %1;": "*(%0) = %1",
    "ld.relaxed.gpu.global.u64 %0, [%1];": "%0 = *(%1)",
    "ld.acquire.gpu.global.u64 %0, [%1];": f"%0 = {_HERE}look_at_flag(%1)",
    "prefetch.tensormap [%0];": "",
    "createpolicy.fractional.L2::evict_first.b64 %0, 1.0;": "%0 = 0",
    "prefetch.global.L2 [%0];": "",
    "griddepcontrol.wait;": "",
    "griddepcontrol.launch_dependents;": "",
    "fence.mbarrier_init.release.cluster;": "",
    "{.reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p;}": f"%0 = {_HERE}elect()",
    "mbarrier.init.shared::cta.b64 [%0], %1;": f"{_HERE}init_barrier(%0, %1)",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;": f"{_HERE}arrive_and_expect(%0, %1)",
    "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}": (
        f"%0 = {_HERE}try_wait(%1, %2)"
    ),
    "barrier.cluster.arrive.release.aligned;": f"{_HERE}arrive_at_cluster()",
    "barrier.cluster.arrive.relaxed.aligned;": f"{_HERE}arrive_at_cluster()",
    "barrier.cluster.wait.acquire.aligned;": f"{_HERE}wait_for_cluster()",
    "{.reg .b32 to, at; mapa.shared::cluster.u32 to, %0, %2; mapa.shared::cluster.u32 at, %1, %2;"
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, [at];}": (
        f"{_HERE}send_floats(%0, %1, %2, %3, %4, %5, %6)"
    ),
    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%0], [%1, {%2, %3, %4}], [%5];": f"{_HERE}copy_boxes(%0, %1, %2, %3, %4, %5)",
}
_STATEMENT = re.compile(
    r'\basm\s*(?:volatile\s*)?\(\s*((?:(?:"[^"]*"|\w+(?:\(\w*\))?)\s*)+)(.*?)\)\s*;', re.DOTALL
)
_TEXT = re.compile(r'"([^"]*)"|(\w+)')
_OPERAND = re.compile(r'"[=+]?\w"\s*\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)')
_SHARED = re.compile(
    r"\b(extern\s+)?__shared__\s(?:__align__\((\d+)\)\s)?([\w\s]*?)(\w+)\s*((?:\[[^\]]*\]\s*)*);"
)
_INCLUDE = re.compile(r'^#include "(.*)"', re.MULTILINE)
_KERNEL = re.compile(r"__global__ void ([^{;]*?)(\w+)\([\w\s,]*\)\s*\{")
"""What stands before its name, the size of clusters among it, and the name."""


class BoxMap(ctypes.Structure):
    """What takes the place of a `TensorMap` of two or three dimensions, the innermost first.

    Sizes and box are values, strides bytes. The swizzle follows from the width of a row; that the
    real map asks for the same one is not checked here.
    """

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("sizes", ctypes.c_uint64 * 3),
        ("strides", ctypes.c_uint64 * 2),
        ("box", ctypes.c_uint32 * 3),
        ("value_bytes", ctypes.c_uint32),
        ("unused", ctypes.c_uint32 * 16),
    )


def build(
    name: str,
    macros: dict[str, int | None],
    folder: Path = SOURCES,
    capability: int = 90,
) -> ctypes.CDLL:
    """The kernels of `name.cu`, compiled once per process.

    Args:
        name, macros: as for `nvrtc.compile_source`.
        folder: of the source and what it includes.
        capability: of the GPU that it is compiled for, such as 80.

    Raises:
        ValueError: inline assembly that has no C++ here.
        RuntimeError: the compiler refused the source.
    """
    return _build(name, (("__CUDA_ARCH__", 10 * capability), *macros.items()), folder)


def launch(
    function: Any,
    grid: int,
    threads: int,
    *arguments: ctypes.Structure,
    shared_bytes: int = 0,
    clusters_at_once: int = 1,
) -> None:
    """Run a kernel, such as `build(...).plan_work`, to its end.

    Args:
        grid: CTAs.
        threads: of a CTA, a multiple of 32.
        arguments: the kernel's.
        shared_bytes: of dynamic shared memory.
        clusters_at_once: that run at the same time, in the order of their CTAs; the next ones begin
            when they have ended.

    Raises:
        RuntimeError: threads that did not come to the same barrier or operation of a warp, or that
            wait for ever; memory that is not theirs; a barrier in shared memory that is used
            before it is made, or at which other bytes arrive than it was told to expect; something
            that only a GPU has.
    """
    pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    message = function(clusters_at_once, grid, threads, shared_bytes, pointers)
    if message is not None:
        raise RuntimeError(message.decode())


def guarded(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of NaN, with memory right behind it that no kernel may touch."""
    count = prod(size)
    pages = -(-count * dtype.itemsize // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages * mmap.PAGESIZE
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError("mprotect: could not guard a page")
    all_bytes = torch.frombuffer(memory, dtype=torch.uint8, count=pages * mmap.PAGESIZE)
    return all_bytes.fill_(0xFF).view(dtype)[-count:].view(*size)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cuda_on_host_")


@cache
def _build(name: str, macros: tuple[tuple[str, int | None], ...], folder: Path) -> ctypes.CDLL:
    assert _COMPILER is not None, "tests that come here need a compiler"
    build_folder = Path(tempfile.mkdtemp(dir=_folder().name))
    _translate(f"{name}.cu", folder, build_folder)
    kernels = _KERNEL.findall((folder / f"{name}.cu").read_text())
    main, library = build_folder / "main.cpp", build_folder / "library.so"
    main.write_text(
        f'#include "{_HEADER}"\n#include "{name}.cu"\n'
        # Of what stands before a kernel's name, this leaves the size of its clusters, or nothing.
        "#undef __cluster_dims__\n#define __cluster_dims__(x, y, z) x\n"
        "inline int cluster_size(int x = 1) { return x; }\n"
        + "".join(
            f'extern "C" __attribute__((visibility("default"))) const char* launch_{kernel}'
            "(int at_once, int grid, int threads, int shared_bytes, const void* const* arguments) {"
            "\n"
            f"  const int cluster = cluster_size({' '.join(before.split())});\n"
            f"  return {_HERE}launch({kernel}, cluster, at_once, grid, threads, shared_bytes, "
            "arguments);\n"
            "}\n"
            for before, kernel in kernels
        )
    )
    options = [f"-D{key}" + ("" if value is None else f"={value}") for key, value in macros]
    command = [_COMPILER, *_OPTIONS, *options, str(main), "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{name}.cu on the host: {result.stderr}")
    loaded = ctypes.CDLL(str(library))
    for _, kernel in kernels:
        function = getattr(loaded, f"launch_{kernel}")
        function.restype = ctypes.c_char_p
        setattr(loaded, kernel, function)
    return loaded


def _translate(name: str, folder: Path, to: Path) -> None:
    """Write what `name` becomes on the host, and what it includes, line by line."""
    text = (folder / name).read_text()
    for included in _INCLUDE.findall(text):
        if not (to / included).exists():
            _translate(included, folder, to)
    text = _STATEMENT.sub(_host_statement, text)
    if re.search(r"\basm\b\s*(volatile\s*)?\(", text):
        raise ValueError(f"{name}: an asm statement of an unknown form")
    text = _SHARED.sub(_host_variable, text)
    (to / name).write_text(f'#line 1 "{folder / name}"\n{text}')


def _host_variable(match: re.Match[str]) -> str:
    is_dynamic, alignment, kind, name = match[1], match[2], match[3], match[4]
    if is_dynamic:
        return f"{kind}* const {name} = ({kind}*){_HERE}dynamic_shared({alignment});"
    return f"{match[0]} {_HERE}begin_with_garbage(&{name}, sizeof {name});"


def _host_statement(match: re.Match[str]) -> str:
    """Literals that stand side by side are one text, and a macro before them is part of it."""
    text = "".join(f"{macro} " if macro else part for part, macro in _TEXT.findall(match[1]))
    text = re.sub(", *", ", ", text)  # with or without a space
    operands = _OPERAND.findall(match[2])
    if text in _ASSEMBLY:
        statement = re.sub(r"%(\d)", lambda number: operands[int(number[1])], _ASSEMBLY[text])
    else:
        raise ValueError(f"inline assembly that has no C++ here: {text}")
    return f"{statement};" + "\n" * match[0].count("\n")
