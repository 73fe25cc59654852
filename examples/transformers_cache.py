"""A transformers model with a 4-bit KV cache: `generate()` with `halfbyte.Cache`.

    python examples/transformers_cache.py [MODEL]

MODEL is the folder or hub id of a supported checkpoint; by default the bundled one.
"""

import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import halfbyte
from halfbyte.assets import bundled_model_path


def main(path: str | Path) -> str:
    """Generate with a packed cache; returns the text."""
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")  # as batches need
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    cache = halfbyte.Cache(model, "nvfp4")  # scales are measured once, on a built-in text

    inputs = tokenizer(["import os", "def main():"], return_tensors="pt", padding=True)
    tokens = model.generate(
        **inputs, past_key_values=cache, max_new_tokens=24, do_sample=False, num_beams=2
    )
    texts: list[str] = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    print("\n---\n".join(texts))
    print(f"\nrecipe {cache.recipe.name}, {cache.pool.plan.bytes_per_token:,.0f} bytes per token")
    return texts[0]


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else bundled_model_path())
