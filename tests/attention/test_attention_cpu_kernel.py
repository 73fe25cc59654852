"""`lengths_fit`, the C++ check of lengths and pages, agrees with the check that raises errors."""

from types import SimpleNamespace

import pytest
import torch

from halfbyte.attention import interface
from halfbyte.attention.cpu import lengths_fit
from halfbyte.kernels.cpu.library import library


@pytest.mark.skipif(library() is None, reason="built without a C++ compiler")
def test_lengths_fit_says_what_the_check_that_words_errors_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interface, "lengths_fit", lambda *_: False)
    generator = torch.Generator().manual_seed(0)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    def rarely() -> bool:
        return int(numbers(0, 16, 1)) == 0

    verdicts = []
    for _ in range(2000):
        seqs, max_pages = int(numbers(0, 4, 1)), int(numbers(1, 4, 1))
        starts = torch.zeros(seqs + 1, dtype=torch.int32)
        starts[1:] = numbers(-1 if rarely() else 0, 3, seqs).cumsum(0)
        tokens = int(starts[-1].clamp(min=0)) + rarely()
        inputs = SimpleNamespace(
            query_start_loc=starts + rarely(),
            seq_lens=numbers(-1 if rarely() else 0, 4 * max_pages + 1 + rarely(), seqs),
            block_tables=numbers(-1 if rarely() else 0, 4 + rarely(), seqs, max_pages),
            query=torch.empty(tokens),
            pages=torch.empty(4),
            layout=SimpleNamespace(block_size=4),
        )
        fits = lengths_fit(
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.block_tables,
            len(inputs.query),
            len(inputs.pages),
            inputs.layout.block_size,
        )
        try:
            interface._check_values(inputs)  # type: ignore[arg-type]
            verdicts.append((fits, True))
        except ValueError:
            verdicts.append((fits, False))
    assert set(verdicts) == {(True, True), (False, False)}
    assert verdicts.count((True, True)) > 500
