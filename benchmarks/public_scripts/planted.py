"""Plants faults in torch under public training scripts, and observes each script.

    python benchmarks/public_scripts/planted.py DIR [--scripts NAME ...] [--faults NAME ...]

DIR is the folder that fetch.py and prepare.py have filled. Every fault must be found, and nine of
ten must be named. Exit code 0: they are.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fetch import scripts
from observed_script import observe

SCRIPTS = (
    "nanogpt",
    "mingpt_ddp",
    "imagenet_spawn_squeezenet",
    "fabric_mnist",
    "accelerate_autoregressive",
)

FAULTS = (
    "averaged_twice",
    "bucket_not_reduced",
    "gradient_scaled_not_unscaled",
    "low_precision_reduce",
    "no_all_reduce",
    "no_sync_left_on",
    "parameter_frozen_on_one_rank",
    "parameter_not_reduced",
    "rank_left_out",
    "stale_gradient_added",
    "sum_not_mean",
    "weights_differ_between_ranks",
)

ALSO_RIGHT = {
    ("nanogpt", "parameter_not_reduced"): "weights_differ_between_ranks",
    ("imagenet_spawn_squeezenet", "parameter_not_reduced"): "weights_differ_between_ranks",
    ("nanogpt", "gradient_scaled_not_unscaled"): "clipped_while_scaled",
    ("mingpt_ddp", "gradient_scaled_not_unscaled"): "clipped_while_scaled",
    ("accelerate_autoregressive", "gradient_scaled_not_unscaled"): "clipped_while_scaled",
}
"""DDP does not broadcast a parameter that it is told to ignore, and the first two scripts do not
give all ranks the same seed: so the ranks really begin with different weights. The other three clip
their gradients, so that these are clipped while the scale is still in them.
"""

STEPS = 2
"""A gradient of an earlier step is added in the second one at the earliest."""

NAMED = 0.9
"""At least this part of the faults must be named."""


def main() -> int:
    """Observe every script with every fault, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where fetch.py has put the scripts")
    parser.add_argument("--scripts", nargs="+", metavar="NAME", default=SCRIPTS)
    parser.add_argument("--faults", nargs="+", metavar="NAME", default=FAULTS)
    parser.add_argument("--reports", action="store_true", help="print every report")
    arguments = parser.parse_args()
    by_name = {script["name"]: script for script in scripts()}
    caught = named = count = 0
    for name in arguments.scripts:
        for fault in arguments.faults:
            more = f"--steps {STEPS} --plant {fault}"
            options = f"{by_name[name].get('options', '')} {more}"
            found = observe({**by_name[name], "options": options}, arguments.folder)
            count += 1
            right = (fault, ALSO_RIGHT.get((name, fault)))
            is_caught, is_named = found.outcome == "different", found.cause in right
            caught += is_caught
            named += is_named
            end = "" if is_named else (" NOT NAMED" if is_caught else " NOT CAUGHT")
            cause = f" [{found.cause}]" if found.cause else ""
            seconds = f"{found.seconds:.0f} s"
            print(f"{name}, {fault}: {found.outcome}{cause}, {seconds}{end}", flush=True)
            if arguments.reports or not is_named:
                print(found.report, flush=True)
    print(f"{caught} of {count} caught, {named} named")
    return 0 if caught == count and named >= NAMED * count else 1


if __name__ == "__main__":
    sys.exit(main())
