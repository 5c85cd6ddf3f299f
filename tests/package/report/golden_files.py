"""Compare a report with its golden file, or write the file anew.

A processor may draw and compute other last bits in float32, which the inputs of most cases are
drawn in. So of a number with four digits or more, the last one is not held.
"""

from __future__ import annotations

import os
import re
from decimal import Decimal
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"

NUMBER = re.compile(r"\d+\.\d+")
LONG = 4


def assert_golden(file: str, report: str) -> None:
    """With UPDATE_GOLDEN in the environment the file is written first."""
    text = stable(report)
    path = GOLDEN / file
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    kept = path.read_text()
    assert with_last_digits_of(kept, text) == kept
    lines = [line for line in text.splitlines() if not line.startswith(("  Repeat:", "  Again:"))]
    assert max(map(len, lines)) <= 100


def stable(text: str) -> str:
    """The text without what another machine or run would write otherwise."""
    text = re.sub(r"\d(\.\d)?e-(1[0-9]|0[6-9])", "<tiny>", text)
    # A gradient that is zero up to rounding: errors and limits are relative to what rounding left.
    text = re.sub(r"error \d(\.\d)?e\+\d\d, limit [\d.e+-]*\d", "error <huge>, limit <any>", text)
    # Where all parameters are the same, rounding decides which of them is the worst.
    text = re.sub(r"worst parameter: [^;\n]*", "worst parameter: <any>", text)
    text = re.sub(r"(?m)^ +\|   File .*\n( +\|     .*\n)*", "", text)
    text = re.sub(r"/\S*/(tests|ddp_equivalence)/", r"\1/", text)
    text = re.sub(r"(?m)^    \| \[rank\d\]:.*\n", "    | <torch's warning>\n", text)
    # The ranks left behind are told of in the order in which they ended.
    return re.sub(
        r"  Then: rank .*\n(    .*\n)*(  .*[Tt]he same( is true of .*)?\.\n)?\n?", "", text
    )


def with_last_digits_of(kept: str, text: str) -> str:
    """The text, with each long number of ``kept`` from which its own differs by one last digit."""
    others = NUMBER.findall(kept)

    def number(match: re.Match[str]) -> str:
        other = others.pop(0) if others else match[0]
        return other if _differ_in_the_last_digit(match[0], other) else match[0]

    return NUMBER.sub(number, text)


def _differ_in_the_last_digit(one: str, other: str) -> bool:
    longer = max(one, other, key=len)
    digits = longer.replace(".", "").lstrip("0")
    last = Decimal(10) ** -len(longer.partition(".")[2])
    return len(digits) >= LONG and abs(Decimal(one) - Decimal(other)) <= last
