#!/usr/bin/env bash
# CPU lane: set up .venv, then lint, types and all tests on gloo. Arguments go to pytest.
# Two workers: while the ranks of one wait for each other, the other judges (WORKERS=0 for none).
set -euo pipefail
cd "$(dirname "$0")/.."
ci/install.sh test,lint
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# set -e: pytest's exit code 5, no test collected, fails the lane like any other.
.venv/bin/pytest -n "${WORKERS:-2}" "$@"
