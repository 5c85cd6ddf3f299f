"""Runs ``ddp-equivalence observe`` on one public script, as the programs of this folder do."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any


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
        return next((text for text, is_marked in self._lines if is_marked), "")

    @property
    def lines(self) -> list[str]:
        """All lines that the report shows."""
        return [text for text, _ in self._lines]

    @cached_property
    def _lines(self) -> list[tuple[str, bool]]:
        found = []
        for step in self.found.get("steps", []):
            for one in step["lines"]:
                path = Path(one["file"])
                source = path.read_text().splitlines()[one["line"] - 1].strip()
                found.append((f"{path.name}:{one['line']}  {source}", one["is_fault"]))
        return found

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
