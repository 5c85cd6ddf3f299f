"""Count what reports on faulty steps show: the outcome, the cause and the faulty line.

    python benchmarks/scoreboard.py [--set NAME ...] [--part 1/4] [--trials SECONDS]
                                    [--steps] [--json PATH]

``known``: the steps of benchmarks/steps/known, with which rules were made; ``opened``: those of
benchmarks/steps/opened, which were read after they had been counted once. Every folder of
benchmarks/unseen_steps is a set by authors who had seen neither rules nor causes nor known steps.
It is there to be counted: who writes rules does not read its steps. Without ``--set``, all unseen
sets run.

For each set the command prints how many steps were different, how many of these have a cause, for
how many the report shows the faulty line (or one at most two lines away), for how many it does so
after trials of edits (``--trials``: for how long; they are made where no cause is known), how many
of the mended steps are the same, how many reports fit on one screen, and the median time of a
check. Of a set whose keys have causes it says how many names are not those. ``--steps`` prints a
line for each step, without its source. Below stands how much code the package has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.programs.__main__ import a_part  # noqa: E402
from benchmarks.steps.keys import (  # noqa: E402
    KNOWN,
    OPENED,
    UNSEEN,
    fits_on_a_screen,
    is_shown,
    keys_of,
    mended,
    verdict_of,
)
from ddp_equivalence.diagnosis.repairs import find_repairs  # noqa: E402

find_repairs.TIMES_IN_A_PROCESS = float("inf")  # every step gets its trials, in one process
HEADINGS = (
    "set          steps  different  cause  otherwise  shown  with edits  mended same  fit  seconds"
)


@dataclass(frozen=True)
class Score:
    """Of one step. ``cause``: the name that was given; ``named_otherwise``: the key has another.
    ``shown``: the report shows the faulty line; ``shown_with_edits``: after trials of edits, None
    if none were made. ``mended``: the outcome of the step with its fault mended. ``fits``: its
    report is on one screen.
    """

    step: str
    outcome: str
    cause: str
    named_otherwise: bool
    shown: bool
    shown_with_edits: bool | None
    mended: str
    fits: bool
    seconds: float


def sets() -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    """Name -> the folder of the steps, and what is wrong with each."""
    folders = [KNOWN, OPENED, *sorted(file.parent for file in UNSEEN.glob("*/keys.toml"))]
    return {folder.name: (folder, keys_of(folder)) for folder in folders}


def score(folder: Path, key: dict[str, Any], trials: float) -> Score:
    """Check one step as it is, with trials of edits, and mended."""
    started = time.perf_counter()
    verdict = verdict_of(folder / key["file"])
    seconds = time.perf_counter() - started
    shown = is_shown(key, str(verdict), folder)
    with_edits: bool | None = None
    if trials:
        with_edits = shown
        if verdict.outcome == "different" and verdict.cause is None:
            with_edits = is_shown(key, str(verdict_of(folder / key["file"], trials)), folder)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"mended_{key['file']}"
        path.write_text(mended(key, folder))
        after = verdict_of(path).outcome
    cause = verdict.cause or ""
    otherwise = "cause" in key and cause != key["cause"]
    step = Path(key["file"]).stem
    fits = fits_on_a_screen(str(verdict))
    return Score(step, verdict.outcome, cause, otherwise, shown, with_edits, after, fits, seconds)


def line_of(name: str, scores: list[Score]) -> str:
    """One line of the table."""
    count = Counter[str]()
    for one in scores:
        count["different"] += one.outcome == "different"
        count["cause"] += bool(one.cause)
        count["otherwise"] += one.named_otherwise
        count["shown"] += one.shown
        count["edits"] += bool(one.shown_with_edits)
        count["mended"] += one.mended == "same"
        count["fit"] += one.fits
    edits = "-" if scores[0].shown_with_edits is None else str(count["edits"])
    seconds = statistics.median(one.seconds for one in scores)
    return (
        f"{name:<12}{len(scores):>6}{count['different']:>11}{count['cause']:>7}"
        f"{count['otherwise']:>11}{count['shown']:>7}{edits:>12}{count['mended']:>13}{count['fit']:>5}"
        f"{seconds:>9.1f}"
    )


def lines_of_code() -> str:
    """How many lines and files the package has, and its folders with the most."""
    by_folder = Counter[str]()
    files = sorted((ROOT / "ddp_equivalence").rglob("*.py"))
    for file in files:
        place = file.relative_to(ROOT / "ddp_equivalence").parts
        by_folder[place[0] if len(place) > 1 else "(root)"] += len(file.read_text().splitlines())
    folders = ", ".join(f"{name} {lines:,}" for name, lines in by_folder.most_common(6))
    return f"ddp_equivalence: {by_folder.total():,} lines in {len(files)} files ({folders}, ...)"


def main() -> int:
    """Print the table; return 1 if a faulty step is the same, a mended one different, or a report
    too long.
    """
    known = sets()
    parser = argparse.ArgumentParser(
        prog="python benchmarks/scoreboard.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--set", nargs="+", choices=sorted(known), help="run these sets only")
    parser.add_argument("--part", type=a_part, default=(1, 1), help="such as 2/4")
    parser.add_argument("--trials", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--steps", action="store_true", help="print a line for each step")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every score")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    number, of = arguments.part
    print(HEADINGS)
    every: dict[str, list[dict[str, Any]]] = {}
    wrong = 0
    for name in arguments.set or [one for one in known if one != "known"]:
        folder, keys = known[name]
        scores = []
        for key in keys[number - 1 :: of]:
            scores.append(score(folder, key, arguments.trials))
            if arguments.steps:
                print(f"  {asdict(scores[-1])}", flush=True)
        print(line_of(name, scores), flush=True)
        every[name] = [asdict(one) for one in scores]
        wrong += sum(
            one.outcome == "same" or one.mended == "different" or not one.fits for one in scores
        )
    print(lines_of_code())
    if arguments.json:
        arguments.json.write_text(json.dumps(every, indent=1))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
