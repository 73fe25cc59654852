"""The committed run of rounded weights is of all cases."""

import json

from benchmarks import weight_rounding


def test_the_committed_run_has_all_cases() -> None:
    report = json.loads(weight_rounding.RESULT.read_text())
    for rows in report["models"].values():
        assert [(row["method"], row["recipe"]) for row in rows] == list(weight_rounding.CASES)
