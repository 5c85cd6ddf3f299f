"""``pytest --ddp-json PATH``: writes the results of a run as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ddp_equivalence.pytest_plugin.run_results import RunResults
from ddp_equivalence.report.versions import versions


def write(path: Path, results: RunResults, must_run: Sequence[str]) -> None:
    """Write the file. Raises OSError if that fails."""
    content = {
        "environment": versions(),
        "cases": [asdict(record) for record in results.records],
        "not_run": [
            {"what": f"{trial.strategy} on {trial.layout} ({trial.lane})", "reason": trial.reason}
            for trial in results.trials_not_run
        ],
        "summary": _summary(results, must_run),
    }
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def _summary(results: RunResults, must_run: Sequence[str]) -> Mapping[str, object]:
    """The counts of a run."""
    planted, not_planted, compared = results.planted, results.not_planted, results.compared
    expected_same = [record for record in not_planted if record.expected == "same"]
    known = [record for record in not_planted if record.known]
    return {
        "compared": len(compared),
        "same": sum(record.outcome == "same" for record in expected_same),
        "different": sum(record.outcome == "different" for record in expected_same),
        "unknown": sum(record.outcome == "unknown" for record in not_planted),
        "known_differences": len(known),
        "known_differences_confirmed": sum(record.confirmed for record in known),
        "not_run": len(results.trials_not_run),
        "planted": len(planted),
        "planted_caught": sum(record.outcome == "different" for record in planted),
        "planted_named": sum(record.planted in record.causes for record in planted),
        "parameters_compared": sum(record.parameters * record.ranks for record in compared),
        "lanes": dict(Counter(record.backend for record in compared)),
        "must_run_missing": list(results.lanes_missing(must_run)),
    }
