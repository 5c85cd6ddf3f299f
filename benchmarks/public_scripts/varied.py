"""Observe right public scripts with other sizes and seeds: none of them must be called different.

    python benchmarks/public_scripts/varied.py FOLDER [--trials 10] [--seed 0] [--scripts NAME ...]

``FOLDER`` is what fetch.py and prepare.py have laid out. In each trial the arguments of size are
drawn anew, and so is the first step that is recorded, before which each script has trained with
other rows to other weights. A step may be unknown with a reason, such as one at the end of an epoch
that has fewer micro-batches than one process makes. Exit code 0: none is different, and nine of ten
are the same.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

from fetch import scripts
from observed_script import observe

SIZES: dict[str, dict[str, tuple[object, ...]]] = {
    "nanogpt": {
        "--batch_size={}": (1, 2, 3, 5),
        "--gradient_accumulation_steps={}": (2, 4, 6),
        "--block_size={}": (8, 16, 24),
        "--n_layer={}": (1, 2, 3),
        "--dropout={}": (0.0, 0.1, 0.3),
    },
    "llama2_c": {
        "--batch_size={}": (1, 2, 3, 5),
        "--gradient_accumulation_steps={}": (2, 4, 6),
        "--max_seq_len={}": (8, 16, 32),
        "--dropout={}": (0.0, 0.2),
    },
    "mingpt_ddp": {
        "trainer_config.batch_size={}": (1, 3, 5),
        "data_config.block_size={}": (8, 16, 24),
        "gpt_config.n_head={}": (1, 4),
    },
    "fabric_mnist": {
        "--batch-size={}": (3, 5, 8),
        "--seed={}": (2, 3, 5, 7),
        "--lr={}": (0.1, 1.0),
    },
    "accelerate_autoregressive": {
        "--gradient_accumulation_steps={}": (1, 2, 3),
        "--per_device_batch_size={}": (1, 2, 3),
    },
    "timm": {
        "--batch-size={}": (1, 2, 3),
        "--grad-accum-steps={}": (1, 2, 3),
        "--seed={}": (2, 3, 5, 7),
        "--smoothing={}": (0.0, 0.1),
    },
}
"""The arguments of each script that are drawn, and their values. The last one of two counts."""

LATEST_FIRST_STEP = 6
"""Recording begins after so many steps at most."""

STEPS = 2

MOST_UNKNOWN = 0.1
"""At most this part of the trials may be unknown."""


def main() -> int:
    """Observe every script with drawn sizes, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="what fetch.py and prepare.py have laid out")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--scripts", nargs="+", choices=SIZES, default=tuple(SIZES))
    arguments = parser.parse_args()
    found_so_often: Counter[str] = Counter()
    for script in scripts(arguments.scripts):
        for trial in range(arguments.trials):
            drawn = random.Random(f"{arguments.seed} {script['name']} {trial}")
            sizes = [
                word.format(drawn.choice(values)) for word, values in SIZES[script["name"]].items()
            ]
            options = script.get("options", "")
            options += f" --steps {STEPS} --from-step {drawn.randint(0, LATEST_FIRST_STEP)}"
            command = f"{script['command']} {' '.join(sizes)}"
            found = observe({**script, "options": options, "command": command}, arguments.folder)
            is_same = found.outcome == "same"
            found_so_often[found.outcome] += 1
            print(
                f"{script['name']}, {' '.join(sizes)},{options}: {found.outcome}, "
                f"{found.seconds:.0f} s{' A FALSE ALARM' if found.outcome == 'different' else ''}",
                flush=True,
            )
            if not is_same:
                print(found.report, flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in found_so_often.most_common()))
    is_as_said = set(found_so_often) <= {"same", "unknown"}
    is_mostly_same = found_so_often["unknown"] <= MOST_UNKNOWN * found_so_often.total()
    return 0 if is_as_said and is_mostly_same else 1


if __name__ == "__main__":
    sys.exit(main())
