"""Are public bugs of released libraries seen, and is the fixed version called the same?

python benchmarks/public_bugs                  all bugs of BUGS
python benchmarks/public_bugs --only NAME      one bug, or one of CANDIDATES; can be repeated
python benchmarks/public_bugs --keep DIR       keep the environments and reports in DIR
python benchmarks/public_bugs --uv             install with uv, which is faster, instead of pip

Each version is installed into an environment of its own, which is deleted after its check. The
table is that of docs/public_bugs.md. Exit code 0 if every wrong version is "different" under the
expected cause, and every right version "same".
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bugs import BUGS, CANDIDATES, PublicBug
from environments import GIGABYTES, environment, kept_environment, run

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Outcome:
    """What came out with one version. ``outcome``: "failed" if there was no verdict."""

    outcome: str
    causes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.outcome} ({', '.join(self.causes)})" if self.causes else self.outcome


def main() -> int:
    arguments = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # environments are deleted then, too
    bugs = [bug for bug in BUGS + CANDIDATES if bug.name in arguments.only] or list(BUGS)
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="public_bugs_"))
    folder.mkdir(parents=True, exist_ok=True)
    needed = GIGABYTES * (2 * len(bugs) if arguments.keep else 1)
    free = shutil.disk_usage(folder).free / 1e9
    print(f"needs up to {needed:.0f} GB in {folder}, where {free:.0f} GB are free", flush=True)
    if free < needed:
        return 2
    uv = shutil.which("uv") if arguments.uv else None
    if arguments.uv and uv is None:
        print("uv is not installed", file=sys.stderr)
        return 2
    print("| bug | wrong version | outcome | right version | outcome |")
    print("|---|---|---|---|---|")
    try:
        as_expected = [show(bug, folder, uv, arguments.keep is not None) for bug in bugs]
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{sum(as_expected)} of {len(bugs)} as expected")
    return 0 if all(as_expected) else 1


def read_arguments() -> argparse.Namespace:
    names = [bug.name for bug in BUGS + CANDIDATES]
    parser = argparse.ArgumentParser(prog="python benchmarks/public_bugs")
    parser.add_argument("--only", action="append", default=[], choices=names, metavar="NAME")
    parser.add_argument("--keep", type=Path, metavar="DIR")
    parser.add_argument("--uv", action="store_true")
    return parser.parse_args()


def show(bug: PublicBug, folder: Path, uv: str | None, keep: bool) -> bool:
    """Print the row of one bug. Returns True if both outcomes are as they should be."""
    wrong = judged(bug, "wrong", bug.wrong, folder, uv, keep)
    right = judged(bug, "right", bug.right, folder, uv, keep)
    links = ", ".join(f"[{url.rsplit('/', 1)[1]}]({url})" for url in bug.urls)
    print(
        f"| {bug.name}: {bug.says} ({links}) | {', '.join(bug.wrong)} | {wrong} "
        f"| {', '.join(bug.right)} | {right} |",
        flush=True,
    )
    expected = () if bug.cause is None else (bug.cause,)
    return wrong == Outcome("different", expected) and right == Outcome("same")


def judged(
    bug: PublicBug, which: str, versions: tuple[str, ...], folder: Path, uv: str | None, keep: bool
) -> Outcome:
    """Install one version and judge the bug's check with it."""
    make = kept_environment if keep else environment
    report, result = folder / f"{bug.name}-{which}.txt", folder / f"{bug.name}-{which}.json"
    result.unlink(missing_ok=True)
    with make(folder / f"{bug.name}-{which}", versions + bug.both, uv) as python:
        command = [str(python), str(HERE / "judge.py"), str(HERE / "checks" / bug.check)]
        run([*command, str(result)], report)
    if not result.exists():
        print(report.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
        return Outcome("failed")
    found = json.loads(result.read_text(encoding="utf-8"))
    return Outcome(found["outcome"], tuple(found["causes"]))


if __name__ == "__main__":
    raise SystemExit(main())
