"""Quantize the bundled model's weights to NVFP4 and generate with them, on an NVFP4 cache.

    python examples/quantize_bundled_model.py FOLDER

FOLDER is a ModelOpt checkpoint then, which `halfbyte generate --model FOLDER` reads as well.
"""

import argparse
from pathlib import Path

from halfbyte import LLM, SamplingParams
from halfbyte.assets import bundled_model_path
from halfbyte.quantization import quantize_checkpoint


def main() -> None:
    """Parse the command line, quantize, generate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="of the new checkpoint")
    folder = parser.parse_args().folder
    report = quantize_checkpoint(
        bundled_model_path(),
        folder,
        dialect="modelopt",
        weights="nvfp4-a16",
        kv_cache_dtype="nvfp4",
    )
    print(f"{report.source_bytes:,} bytes -> {report.bytes:,}, {report.mean_sqnr_db:.1f} dB")
    llm = LLM(folder, kv_cache_dtype="auto")  # as the checkpoint declares it
    output = llm.generate(["def main():\n"], SamplingParams(max_tokens=32))[0]
    print(output.text)


if __name__ == "__main__":
    main()
