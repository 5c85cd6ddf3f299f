"""Observes public training scripts, and compares the verdicts with those written down before.

    python benchmarks/public_scripts/fetch.py DIR
    python benchmarks/public_scripts/prepare.py DIR
    python benchmarks/public_scripts DIR [--only NAME ...] [--markdown PATH]

The packages that scripts.toml names must be installed. Exit code 0: every verdict is as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Result:
    """``found``: what the command wrote as JSON; empty if it wrote nothing."""

    script: dict[str, Any]
    found: dict[str, Any]
    report: str
    seconds: float

    @property
    def outcome(self) -> str:
        """The verdict."""
        return self.found.get("outcome") or ("unknown" if "unknown:" in self.report else "none")

    @property
    def cause(self) -> str:
        """The name of the cause; "" without one."""
        return self.found.get("cause") or ""

    @property
    def line(self) -> str:
        """The line that the report marks, as ``file:number  source``; "" without one."""
        for step in self.found.get("steps", []):
            for one in step["lines"]:
                if one["is_fault"]:
                    path = Path(one["file"])
                    source = path.read_text().splitlines()[one["line"] - 1].strip()
                    return f"{path.name}:{one['line']}  {source}"
        return ""

    @property
    def surprise(self) -> str:
        """What is not as expected; "" if everything is."""
        if self.outcome != self.script["expected"]:
            return f"{self.outcome}, expected {self.script['expected']}"
        if self.outcome == "different" and self.cause != self.script["cause"]:
            return f"cause {self.cause or 'none'}, expected {self.script['cause'] or 'none'}"
        if self.outcome == "different" and self.script["line"] not in self.line:
            return f"line {self.line or 'none'}, expected {self.script['line']}"
        return ""


def observe(script: dict[str, Any], folder: Path) -> Result:
    """Run the command on one script."""
    started = time.monotonic()
    at = folder / script["name"] / script["cwd"]
    words = shlex.split(" ".join(script["command"].split()))
    options = ["--as-cpu"] if script["as_cpu"] else []
    options += shlex.split(script.get("options", ""))
    with tempfile.TemporaryDirectory() as results:
        path = Path(results) / "results.json"
        run = subprocess.run(
            ["ddp-equivalence", "observe", "--json", str(path), *options, "--", *words],
            cwd=at,
            env={**os.environ, **script.get("environment", {})},
            capture_output=True,
            text=True,
            check=False,
        )
        found = json.loads(path.read_text()) if path.exists() else {}
    return Result(script, found, run.stdout + run.stderr, time.monotonic() - started)


def markdown(results: list[Result]) -> str:
    """The table of docs/observe.md."""
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
        cause = f"`{one.cause}`" if one.cause else next(filter(None, because), "")
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
    scripts = tomllib.loads((HERE / "scripts.toml").read_text())["script"]
    if arguments.only:
        scripts = [one for one in scripts if one["name"] in arguments.only]
    results = []
    for script in scripts:
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
