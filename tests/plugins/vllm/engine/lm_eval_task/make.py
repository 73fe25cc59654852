"""Writes `continuations.jsonl`: which of four lines comes next in a text the model has not seen.

    PYTHONPATH=src python tests/plugins/vllm/engine/lm_eval_task/make.py

The other three lines come later in the same text.
"""

import json
import random
from pathlib import Path

from halfbyte.assets import heldout_texts

FILE = Path(__file__).with_name("continuations.jsonl")
PER_TEXT = 4
CONTEXT_LINES = 8
LINE_CHARACTERS = 24
"""Min characters of a line that is used in a question."""


def samples(name: str, text: str, rng: random.Random) -> list[dict[str, object]]:
    """Some questions about one text."""
    lines = text.splitlines(keepends=True)
    usable = [i for i, line in enumerate(lines) if len(line.strip()) >= LINE_CHARACTERS]
    usable = [i for i in usable if i >= CONTEXT_LINES]
    found = []
    for i in sorted(rng.sample(usable[:-8], PER_TEXT)):
        later = [j for j in usable if j > i and lines[j] != lines[i]]
        choices = [lines[i], *(lines[j] for j in rng.sample(later, 3))]
        rng.shuffle(choices)
        context = "".join(lines[i - CONTEXT_LINES : i])
        found.append(
            {
                "text": name,
                "line": i + 1,
                "context": context,
                "choices": choices,
                "gold": choices.index(lines[i]),
            }
        )
    return found


def main() -> None:
    """Write the file."""
    rng = random.Random(0)
    rows = [row for name, text in heldout_texts().items() for row in samples(name, text, rng)]
    FILE.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
