"""Nothing grows over many checks on one set of ranks.

``python benchmarks/soak.py`` makes thousands of checks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.package.forks import completed
from tests.package.one_server import with_server_of_these_tests
from tests.package.someone_elses_run import LONGEST, environment

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "soak.py"


def test_memory_descriptors_and_threads_do_not_grow_with_the_checks() -> None:
    command = [sys.executable, str(BENCHMARK), "--checks", "100"]
    variables = with_server_of_these_tests(environment())
    done = completed(command, BENCHMARK.parent, variables, LONGEST)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sets of ranks started   1\n" in done.stdout
    assert "grew from the second block to the last: nothing" in done.stdout
