#!/usr/bin/env bash
# CPU lane: set up .venv, then run lint, types and all tests on gloo. Arguments go to pytest.
# Two workers: one judges while the ranks of the other wait for each other. WORKERS=0: no workers.
set -euo pipefail
cd "$(dirname "$0")/.."
ci/install.sh test,lint
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/lint-imports
.venv/bin/mypy
# set -e: pytest's exit code 5, no test collected, fails the lane like any other.
.venv/bin/pytest -n "${WORKERS:-2}" "$@"
