"""Small tokenizers: SentencePiece and byte-level BPE."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<|im_end|>")
_WORDS = "▁the ▁cat ▁sat ▁on ▁mat ▁END sat on a s t . , ▁ € x".split()  # noqa: SIM905


def sentencepiece() -> Any:
    """As Llama 2's: words that begin with a space, bytes for what has no token."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(_WORDS)]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _fast(tokenizer)


def byte_level() -> Any:
    """As GPT 2's: every token is some bytes, which need not be whole characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL, *letters]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _fast(tokenizer)


def _fast(tokenizer: Tokenizer) -> Any:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
