"""Parses the options of `halfbyte bench`."""

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from halfbyte.bench import Case, MoeShape


def parse_moe_shapes(text: str) -> "list[MoeShape]":
    """Shapes by name or sizes; ValueError for something else."""
    from halfbyte.bench import MOE_SHAPES, MoeShape

    result = []
    for part in map(str.strip, text.split(",")):
        sizes = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)", part.lower())
        if sizes is None and part not in MOE_SHAPES:
            raise ValueError(
                f"shapes: expected {', '.join(MOE_SHAPES)}, or experts x top-k x hidden x "
                f"intermediate size such as 128x8x2048x768, got {part!r}"
            )
        if sizes is None:
            shape = MOE_SHAPES[part]
        else:
            num_experts, top_k, hidden, inner = (_number("shapes", x) for x in sizes.groups())
            shape = MoeShape(num_experts, top_k, hidden, inner)
        if not 1 <= shape.top_k <= shape.num_experts:
            raise ValueError(f"shapes: expected top-k of 1 .. experts, got {part!r}")
        result.append(shape)
    return result


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """N and K of `6144x4096,4096x14336`; ValueError for something else."""
    parts = [re.fullmatch(r"\s*(\d+)\s*[xX]\s*(\d+)\s*", part) for part in text.split(",")]
    sizes = [(part[1], part[2]) for part in parts if part]
    if len(sizes) != len(parts):
        raise ValueError(f"shapes: expected N x K such as 6144x4096,4096x14336, got {text!r}")
    return [(_number("shapes", n), _number("shapes", k)) for n, k in sizes]


def choose_cases(
    device_type: str, only: str | None, batch: str | None, context: str | None, heads: str | None
) -> "list[Case]":
    """The default cases or a grid, filtered by the regular expression `only`.

    Raises:
        ValueError: bad numbers, an unknown preset, not a regular expression, or no case is left.
    """
    cases = default_cases(device_type)
    if batch or context or heads:
        presets = [name.strip() for name in (heads or "llama").split(",")]
        cases = grid(presets, numbers("batch", batch or "1"), numbers("context", context or "8192"))
    try:
        chosen = [case for case in cases if re.search(only or "", case.name)]
    except re.error as error:
        raise ValueError(f"only: {only!r} is not a regular expression: {error}") from None
    if not chosen:
        names = ", ".join(case.name for case in cases)
        raise ValueError(f"only: {only!r} matches none of {names}")
    return chosen


def default_cases(device_type: str) -> "list[Case]":
    """Cases for a GPU, and fewer and smaller ones for a CPU."""
    from halfbyte.bench.cases import decode, prefill, store

    if device_type == "cuda":
        sizes = ((64, 8192), (8, 32768), (1, 131072), (128, 1024))
        presets = ("gpt-oss", "gemma", "mistral", "gpt-oss-sliding")
        return [
            *(decode("llama", *size) for size in sizes),
            *(decode(preset, 64, 8192) for preset in presets),
            *(store("llama", tokens) for tokens in (8192, 64)),
            *(prefill("llama", 4, 2048, cached) for cached in (0, 32768)),
        ]
    return [
        *(decode("llama", *size) for size in ((1, 8192), (8, 2048))),
        *(decode(preset, 1, 4096) for preset in ("gpt-oss", "gemma", "gpt-oss-sliding")),
        store("llama", 256),
        *(prefill("llama", 1, 256, cached) for cached in (0, 2048)),
    ]


def grid(presets: list[str], batches: list[int], contexts: list[int]) -> "list[Case]":
    """Decode, prefill of whole prompts, and store, for every combination; ValueError for a preset
    that does not exist."""
    from halfbyte.bench.cases import PRESETS, decode, prefill, store

    if unknown := [name for name in presets if name not in PRESETS]:
        raise ValueError(f"heads: unknown {unknown[0]!r}; expected one of {', '.join(PRESETS)}")
    points = [(p, b, c) for p in presets for b in batches for c in contexts]
    cases = [
        *(decode(*point) for point in points),
        *(prefill(*point) for point in points),
        *(store(preset, batch * context) for preset, batch, context in points),
    ]
    return list(dict.fromkeys(cases))


def numbers(name: str, text: str) -> list[int]:
    """Positive numbers of an option, separated by commas; ValueError for something else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[+-]?\d+", part) for part in parts):
        raise ValueError(f"{name}: expected numbers separated by commas, got {text!r}")
    return [_number(name, part) for part in parts]


def _number(name: str, text: str) -> int:
    """A size that kernels can count in 32 bits."""
    # Python reads no number of more than 4,300 digits.
    number = int(text[:20])
    if number < 1:
        raise ValueError(f"{name}: expected at least 1, got {text}")
    if number >= 2**31:
        raise ValueError(f"{name}: expected less than 2^31, got {text}")
    return number


def check_memory(
    device: "torch.device", names: str, needed: "Iterable[tuple[object, int]]"
) -> None:
    """Raise ValueError for cases that need more memory than the device has in total.

    Args:
        device: of the data.
        names: of the options that the cases were made from.
        needed: each case, and a lower bound of its bytes.
    """
    import torch

    if device.type == "cuda":
        there = torch.cuda.mem_get_info(device)[1]
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for case, num_bytes in needed:
        if num_bytes > there:
            needs, has = (f"{x / 2**30:,.1f} GiB" for x in (num_bytes, there))
            raise ValueError(f"{names}: {case} needs at least {needs}, the {device.type} has {has}")


def linear_bytes(shape: tuple[int, int], m: int) -> int:
    """Bytes of weights, x and the product in bfloat16."""
    n, k = shape
    return 2 * (n * k + m * (n + k))


def moe_bytes(shape: "MoeShape", m: int) -> int:
    """Bytes of the experts' three matrices, x and the sum in bfloat16."""
    weights = 3 * shape.num_experts * shape.hidden_size * shape.intermediate_size
    return 2 * (weights + 2 * m * shape.hidden_size)
