"""The table of rounded weights is that of the committed run."""

import json

from benchmarks import weight_rounding


def test_docs_show_the_committed_run_of_rounded_weights() -> None:
    report = json.loads(weight_rounding.RESULT.read_text())
    assert weight_rounding.table(report) in weight_rounding.PAGE.read_text()
    for rows in report["models"].values():
        assert [(row["method"], row["recipe"]) for row in rows] == list(weight_rounding.CASES)
