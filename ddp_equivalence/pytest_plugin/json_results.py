"""``pytest --ddp-json PATH``: writes the results of a run as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from ddp_equivalence.pytest_plugin.run_results import RunResults
from ddp_equivalence.report.record import Record
from ddp_equivalence.report.versions import versions

OF_A_RECORD = frozenset(("digests", "details"))
"""They are known in a run that is recorded."""

OF_A_REPORT = frozenset(("report", "full_report", "headline", "file", "line"))

_error = pytest.StashKey[OSError]()


def written(config: pytest.Config, results: RunResults) -> bool:
    """Write the file, if the run has the option. Returns False if that fails."""
    path: Path | None = config.getoption("--ddp-json")
    if path is None:
        return True
    try:
        # A test may have changed the working folder.
        _write(config.invocation_params.dir / path, results, config.getoption("--must-run"))
    except OSError as error:
        config.stash[_error] = error
        return False
    return True


def say_if_not_written(config: pytest.Config, terminal: pytest.TerminalReporter) -> None:
    """Say that the file could not be written, if that is so."""
    error = config.stash.get(_error, None)
    if error is not None:
        terminal.line(
            f"--ddp-json {config.getoption('--ddp-json')}: FAILED, the results could not be "
            f"written: {error.strerror}",
            red=True,
        )


def _write(path: Path, results: RunResults, must_run: Sequence[str]) -> None:
    content = {
        "environment": versions(),
        "cases": [_case(record) for record in results.records],
        "not_run": [
            {"what": f"{trial.strategy} on {trial.layout} ({trial.lane})", "reason": trial.reason}
            for trial in results.trials_not_run
        ],
        "summary": _summary(results, must_run),
    }
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def _case(record: Record) -> Mapping[str, object]:
    """The fields of a record; those of a report only where there is one."""
    fields = {name: value for name, value in asdict(record).items() if name not in OF_A_RECORD}
    if record.report:
        return fields
    return {name: value for name, value in fields.items() if name not in OF_A_REPORT}


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
