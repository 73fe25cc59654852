"""The PTX that decodes small floats: its steps executed here, for every byte and every scale."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte.numerics import e2m1, e4m3, e5m2, e8m0

pytest.importorskip("triton")

from halfbyte.kernels.formats import decode as decode_formats

Registers = dict[str, np.ndarray]


def run_ptx(source: str, **arguments: np.ndarray) -> Registers:
    """Execute the few PTX instructions that our sources have, on vectors of uint32.

    Args:
        source: PTX with operands `$0`, `$1`, ...
        arguments: values of input operands, `in4` for `$4`.

    Returns:
        All registers by name, outputs as `$0`, ...
    """
    registers: Registers = {name.replace("in", "$"): x for name, x in arguments.items()}

    def value(operand: str) -> np.ndarray:
        return registers[operand] if operand in registers else np.array(int(operand, 0), np.uint32)

    for line in source.strip().strip("{}").split(";"):
        words = re.split(r"[\s,]+", line.strip())
        if words[0] in ("", ".reg"):
            continue
        name, target = words[0], words[1]
        operands = [value(word) for word in words[2:]]
        registers[target] = _INSTRUCTIONS[name](*operands).astype(np.uint32)
    return registers


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros(a.shape, np.uint64)
    for i in range(4):
        byte = int(selector) >> (4 * i) & 0xF
        assert byte < 8, "sign replication"
        result |= ((both >> np.uint64(8 * byte)) & np.uint64(0xFF)) << np.uint64(8 * i)
    return result


def _times_f16x2(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return (a.view(np.float16) * b.view(np.float16)).view(np.uint32)


def _fma_bf16x2(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    words = [np.ascontiguousarray(x) for x in np.broadcast_arrays(a, b, c)]
    x, y, z = (
        torch.from_numpy(word.view(np.int16)).view(torch.bfloat16).double() for word in words
    )
    return (x * y + z).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint32)


_INSTRUCTIONS: dict[str, Any] = {
    "mov.b32": lambda a: a,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "add.u32": np.add,
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
    "prmt.b32": _prmt,
    "mul.rn.f16x2": _times_f16x2,
    "fma.rn.bf16x2": _fma_bf16x2,
}

# Every byte, four to a word, each in every place of some word.
BYTES = np.arange(1024, dtype=np.uint32).astype(np.uint8).reshape(4, 256)
WORDS = np.concatenate([np.roll(row, i) for i, row in enumerate(BYTES)]).view(np.uint32)
IN_ORDER = torch.from_numpy(WORDS.view(np.uint8).copy())


def halves(registers: Registers, names: str, dtype: torch.dtype) -> torch.Tensor:
    """Values of two registers per word, in the order of the word's bytes; float64."""
    pairs = [registers[f"${name}"].view(np.int16).reshape(-1, 2) for name in names]
    return torch.from_numpy(np.concatenate(pairs, axis=1).reshape(-1)).view(dtype).double()


def pairs_of(factors: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Registers of the two pairs of every four consecutive 16-bit values."""
    words = factors.view(torch.int16).numpy().view(np.uint32).reshape(-1, 2)
    return words[:, 0].copy(), words[:, 1].copy()


def assert_same(values: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_ptx(kind: str) -> None:
    source = {"fp8_e4m3": decode_formats.FP8_E4M3_PTX, "fp8_e5m2": decode_formats.FP8_E5M2_PTX}
    registers = run_ptx(source[kind].value, in2=WORDS)
    values = halves(registers, "01", torch.float16)
    oracle, factor = (e4m3, 2.0**8) if kind == "fp8_e4m3" else (e5m2, 1.0)
    assert_same(values * factor, oracle.decode(IN_ORDER).double())


def test_nvfp4_ptx_for_every_byte_and_scale() -> None:
    for byte in range(256):
        scales = torch.full((1024,), byte, dtype=torch.uint8)
        factors = (e4m3.decode(scales) * 2.0**7).half()
        first, second = pairs_of(factors)
        registers = run_ptx(decode_formats.NVFP4_PTX.value, in4=WORDS, in5=first, in6=second)
        for names, codes in (("01", IN_ORDER & 0xF), ("23", IN_ORDER >> 4)):
            expected = e2m1.decode(codes) * e4m3.decode(scales)
            assert_same(halves(registers, names, torch.float16) * 2.0**7, expected.double())


def test_e8m0_ptx_for_every_byte_and_scale() -> None:
    for byte in range(256):
        scales = torch.full((1024,), byte, dtype=torch.uint8)
        first, second = pairs_of(e8m0.decode(scales).bfloat16())
        registers = run_ptx(decode_formats.E8M0_FP4_PTX.value, in4=WORDS, in5=first, in6=second)
        for names, codes in (("01", IN_ORDER & 0xF), ("23", IN_ORDER >> 4)):
            expected = e2m1.decode(codes).double() * e8m0.decode(scales).double()
            # 2^-134 is half of the smallest bfloat16: values below 2^-127 lose their last bits.
            torch.testing.assert_close(
                halves(registers, names, torch.bfloat16) * 2.0**6,
                expected,
                rtol=0,
                atol=2.0**-127 if byte < 2 else 0,
                equal_nan=True,
            )
