"""Breaks public training scripts by the edits in edits.toml, and observes each of them.

    python benchmarks/public_scripts/edited.py DIR [--only NAME ...]

DIR is the folder that fetch.py and prepare.py have filled; it stays as it is. An edit must be found
different, or unknown with a reason; "same" is a miss. An edit that is wrong in one process in the
same way (``shared``) may be the same. Exit code 0: none is missed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from fetch import scripts
from observed_script import observe

HERE = Path(__file__).parent

NEAR = 3
"""A line that is marked no more lines away than this from an edited one is near it."""


def broken(edit: dict[str, Any], folder: Path, copies: Path) -> None:
    """Copy the script's folder, and make the edit in the copy. The edit learns its ``new_lines``.

    Raises ValueError unless the text to replace occurs once.
    """
    copy = copies / edit["script"]
    shutil.copytree(folder / edit["script"], copy, symlinks=True)
    path = copy / edit["file"]
    text = path.read_text()
    if text.count(edit["old"]) != 1:
        raise ValueError(f"{edit['name']}: the text occurs {text.count(edit['old'])} times")
    before, _, _ = text.partition(edit["old"])
    first = before.count("\n") + 1
    edit["new_lines"] = range(first, first + edit["new"].count("\n") + 1)
    path.write_text(text.replace(edit["old"], edit["new"]))


def is_near(line: str, edit: dict[str, Any]) -> bool:
    """True if the marked ``file:number  source`` is in the lines of the edit, or near them."""
    file, _, rest = line.partition(":")
    number, _, _ = rest.partition("  ")
    if file != Path(edit["file"]).name or not number:
        return False
    lines = edit["new_lines"]
    return bool(lines.start - NEAR <= int(number) < lines.stop + NEAR)


def main() -> int:
    """Observe every edit, and print what was found beside what is at fault."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where fetch.py has put the scripts")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these edits")
    parser.add_argument("--reports", action="store_true", help="print every report")
    arguments = parser.parse_args()
    edits = tomllib.loads((HERE / "edits.toml").read_text())["edit"]
    by_name = {script["name"]: script for script in scripts()}
    if arguments.only:
        edits = [one for one in edits if one["name"] in arguments.only]
    missed = marked = near = shown = 0
    for edit in edits:
        with tempfile.TemporaryDirectory() as copies:
            broken(edit, arguments.folder, Path(copies))
            found = observe(by_name[edit["script"]], Path(copies))
            line, lines = found.line, found.lines  # of files in the copies
        is_missed = found.outcome in ("same", "none") and not edit.get("shared", False)
        missed += is_missed
        fault = edit["fault_line"].strip()
        is_marked, is_shown = fault in line, any(fault in one for one in lines)
        is_near_it = is_marked or is_near(line, edit)
        marked, near, shown = marked + is_marked, near + is_near_it, shown + is_shown
        cause = f" [{found.cause}]" if found.cause else ""
        beside = "near line" if is_near_it else ("line shown" if is_shown else "not the line")
        where = "line marked" if is_marked else beside
        end = "MISSED" if is_missed else f"{where}: {line or 'none'}"
        print(f"{edit['name']}: {found.outcome}{cause}, {found.seconds:.0f} s, {end}", flush=True)
        if arguments.reports or is_missed:
            print(found.report, flush=True)
    print(f"{len(edits) - missed} of {len(edits)} not missed; the marked line is the edited one in")
    print(f"{marked}, in the edit or within {NEAR} lines of it in {near}; {shown} are shown")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
