"""Table and picture of decode in docs/numbers/attention.md, from the committed run.

    halfbyte bench attention --kv-cache-dtype nvfp4,fp8,bfloat16 \
        --out benchmarks/results/attention_decode.json
    python benchmarks/attention_decode.py

The first measures, on a GPU with FlashInfer installed; the second writes.
"""

import json
import re
from pathlib import Path

from halfbyte.bench import markdown_table
from halfbyte.bench.picture import draw

REPOSITORY = Path(__file__).parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "attention_decode.json"
PAGE = REPOSITORY / "docs" / "numbers" / "attention.md"
PICTURE = REPOSITORY / "docs" / "attention_decode.svg"
MARKERS = re.compile(r"(<!-- decode -->\n).*?(<!-- /decode -->)", re.DOTALL)
table = markdown_table


def main() -> None:
    """Write both."""
    report = json.loads(RESULT.read_text())
    PAGE.write_text(MARKERS.sub(rf"\g<1>{table(report)}\g<2>", PAGE.read_text()))
    draw(report, PICTURE)


if __name__ == "__main__":
    main()
