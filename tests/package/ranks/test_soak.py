"""Nothing grows over many checks on one set of ranks.

``python benchmarks/soak.py`` makes thousands of checks.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "soak.py"


def test_memory_descriptors_and_threads_do_not_grow_with_the_checks() -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--checks", "100"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sets of ranks started   1\n" in done.stdout
    assert "grew from the second block to the last: nothing" in done.stdout
