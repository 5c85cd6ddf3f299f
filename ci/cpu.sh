#!/usr/bin/env bash
# CPU lane: set up .venv, then run lint, types and all tests on gloo. Arguments go to pytest.
# pytest runs with two xdist workers: one judges while the ranks of the other wait for each other.
# WORKERS=0 turns xdist off.
set -euo pipefail
cd "$(dirname "$0")/.."
ci/install.sh test,lint
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/lint-imports
.venv/bin/mypy
# If no test is collected, pytest exits with code 5, and set -e makes the lane fail.
.venv/bin/pytest -n "${WORKERS:-2}" "$@"
