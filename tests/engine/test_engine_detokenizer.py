"""Text from token ids, piece by piece: the same as from all at once, at a constant cost."""

import pytest

from halfbyte.assets import bundled_model_path
from halfbyte.engine.detokenizer import Detokenizer
from halfbyte.models import load_tokenizer


class Bytes:
    """A tokenizer whose ids are bytes."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode(errors="replace")


def pieces(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(Bytes(), stop)
    out = []
    for byte in text.encode():
        out.append(detokenizer.push(byte))
        if detokenizer.stopped:
            return out, detokenizer
    out.append(detokenizer.finish())
    return out, detokenizer


def test_detokenizer_holds_back_half_characters() -> None:
    out, _ = pieces("a€b")
    assert out == ["a", "", "", "€", "b", ""]


def test_detokenizer_gives_back_an_incomplete_end() -> None:
    detokenizer = Detokenizer(Bytes())
    assert detokenizer.push("€".encode()[0]) == ""
    assert detokenizer.finish() == "�"


def test_detokenizer_decodes_few_ids_per_token() -> None:
    seen = []

    class Counting(Bytes):
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            seen.append(len(ids))
            return super().decode(ids, skip_special_tokens)

    detokenizer = Detokenizer(Counting(), ("END",))
    text = "x = 'é€😀'  # " * 50
    assert "".join(map(detokenizer.push, text.encode())) + detokenizer.finish() == text
    assert max(seen) <= 13


@pytest.mark.parametrize("text", ["def f(x):\n    return '日本語 😀'\n\n", "  a\tb  c\n"])
def test_detokenizer_gives_the_text_of_all_ids(text: str) -> None:
    tokenizer = load_tokenizer(bundled_model_path())
    ids = tokenizer(text * 3).input_ids
    detokenizer = Detokenizer(tokenizer)
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == expected


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", ("END",), "one "),
        ("one EN two", ("END",), "one EN two"),
        ("ababac!", ("abac",), "ab"),
        ("x\n\ny", ("\n\n", "y"), "x"),
        ("tail EN", ("END",), "tail EN"),
    ],
    ids=["cut", "not-quite", "overlapping", "first-of-two", "held-back-at-the-end"],
)
def test_detokenizer_stop_strings(text: str, stop: tuple[str, ...], expected: str) -> None:
    out, detokenizer = pieces(text, stop)
    assert "".join(out) == expected == detokenizer.text
