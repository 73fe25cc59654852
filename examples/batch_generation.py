"""Batch generation with `halfbyte.LLM`: many prompts, sampling per request, tokens as they come.

    python examples/batch_generation.py [MODEL]

MODEL is the folder or hub id of a supported checkpoint; by default the bundled one.
"""

import sys
from pathlib import Path

import halfbyte
from halfbyte.assets import bundled_model_path

PROMPTS = ["import os", "def main():", "class Stack:"]


def main(path: str | Path) -> list[str]:
    """Generate for a batch, then stream one prompt; returns the texts."""
    llm = halfbyte.LLM(path, kv_cache_dtype="nvfp4", max_model_len=512)
    params = [
        halfbyte.SamplingParams(max_tokens=16, temperature=0),
        halfbyte.SamplingParams(max_tokens=16, temperature=0.7, top_p=0.9, seed=1),
        halfbyte.SamplingParams(max_tokens=16, temperature=0.7, n=2, seed=2),
    ]
    outputs = llm.generate(PROMPTS, params)
    for output in outputs:
        for completion in output.outputs:
            print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")

    streamed = ""
    for token in llm.stream(PROMPTS[0], params[0]):
        print(token.text, end="", flush=True)
        streamed += token.text
    print()
    return [*(completion.text for output in outputs for completion in output.outputs), streamed]


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else bundled_model_path())
