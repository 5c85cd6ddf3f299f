"""Observes public training scripts, and compares the verdicts with those written down before.

    python benchmarks/public_scripts/fetch.py DIR
    python benchmarks/public_scripts/prepare.py DIR
    python benchmarks/public_scripts DIR [--only NAME ...] [--markdown PATH]

The packages that scripts.toml names must be installed. Exit code 0: every verdict is as expected.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fetch import scripts
from observed_script import Result, observe

REASONS = {
    "reference_is_zero": "the gradient is zero, and so is its loss",
    "reference_not_finite": "the gradient is not finite",
    "cannot_replay": "one process cannot run it",
}
"""Why nothing could be compared, in words."""


def markdown(results: list[Result]) -> str:
    """The table of all scripts, which docs/observe.md sums up."""
    rows = [
        "| script | commit | what it is | verdict | cause | line | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in results:
        repository, commit = one.script["repository"], one.script["commit"]
        path = one.script["files"][0]["path"]
        name = f"{repository.rpartition('/')[2]} {path.rpartition('/')[2]}"
        link = f"[{name}](https://github.com/{repository}/blob/{commit}/{path})"
        line = f"`{one.line}`" if one.line else ""
        because = [step["unknown_because"] for step in one.found.get("steps", [])]
        reason = next(filter(None, because), "")
        cause = f"`{one.cause}`" if one.cause else REASONS.get(reason, reason)
        seconds = f"{one.seconds:.0f}"
        cells = (link, commit[:7], one.script["kind"], one.outcome, cause, line, seconds)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    """Observe the scripts, and say which verdicts surprise."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where fetch.py has put the scripts")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these scripts")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--reports", action="store_true", help="print every report")
    arguments = parser.parse_args()
    results = []
    for script in scripts(arguments.only or ()):
        one = observe(script, arguments.folder)
        results.append(one)
        end = f"NOT AS EXPECTED: {one.surprise}" if one.surprise else "as expected"
        cause = f" [{one.cause}]" if one.cause else ""
        print(f"{script['name']}: {one.outcome}{cause}, {one.seconds:.0f} s: {end}", flush=True)
        if arguments.reports or one.surprise:
            print(one.report, flush=True)
    if arguments.markdown:
        arguments.markdown.write_text(markdown(results))
    surprises = sum(bool(one.surprise) for one in results)
    print(f"{len(results) - surprises} of {len(results)} as expected")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
