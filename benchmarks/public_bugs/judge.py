"""Judges one check file in the environment that this Python belongs to.

python judge.py CHECK.py[:STEP] RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ddp_equivalence import check
from ddp_equivalence.commands.user_file import load

SECONDS = 600.0
"""What the ranks get: in a new environment they compile all that they import."""


def main(target: str, result: Path) -> None:
    file, _, name = target.partition(":")
    found = load(Path(file), name or "step")
    verdict = check(found.case, found.step, **({"deadline": SECONDS} | found.options))
    print(verdict)
    result.write_text(
        json.dumps({"outcome": verdict.outcome, "causes": list(verdict.causes)}), encoding="utf-8"
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
