"""Compare a report with its golden file, or write the file anew."""

from __future__ import annotations

import os
import re
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"


def assert_golden(file: str, report: str) -> None:
    """With UPDATE_GOLDEN in the environment the file is written first."""
    text = stable(report)
    path = GOLDEN / file
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("  Repeat:", "  Again:"))]
    assert max(map(len, lines)) <= 100


def stable(text: str) -> str:
    """The text without what another machine or run would write otherwise."""
    text = re.sub(r"\d(\.\d)?e-(1[0-9]|0[6-9])", "<tiny>", text)
    # Where all parameters are the same, rounding decides which of them is the worst.
    text = re.sub(r"worst parameter: [^;\n]*", "worst parameter: <any>", text)
    text = re.sub(r"(?m)^ +\|   File .*\n( +\|     .*\n)*", "", text)
    text = re.sub(r"/\S*/(tests|ddp_equivalence)/", r"\1/", text)
    text = re.sub(r"(?m)^    \| \[rank\d\]:.*\n", "    | <torch's warning>\n", text)
    # The ranks left behind are told of in the order in which they ended.
    return re.sub(
        r"  Then: rank .*\n(    .*\n)*(  .*[Tt]he same( is true of .*)?\.\n)?\n?", "", text
    )
