#!/usr/bin/env bash
# CPU lane: set up .venv, then run lint, types and tests on gloo.
#   ci/cpu.sh             the tests of every change (tests/conftest.py)
#   ci/cpu.sh --thorough  all tests
# Further arguments go to pytest. It runs with two xdist workers: one judges while the ranks of the
# other wait for each other. WORKERS=0 turns xdist off. When a test has run for 600 s, pytest prints
# what every thread was doing and ends the worker; that test fails, and the others go on.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=(--ddp-pairwise)
if [[ "${1:-}" == --thorough ]]; then
    tests=()
    shift
fi
# The tests start some hundred interpreters, each of which would compile the package again.
unset PYTHONDONTWRITEBYTECODE
ci/install.sh test,lint
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/lint-imports
# mypy needs one core for 40 s, so it runs beside the tests. What it finds is printed after them.
types="$(mktemp)"
.venv/bin/mypy > "$types" 2>&1 &
mypy=$!
trap 'kill "$mypy" 2> /dev/null || true; rm -f "$types"' EXIT
code=0
# If no test is collected, pytest exits with code 5, which makes the lane fail.
.venv/bin/pytest -n "${WORKERS:-2}" --dist worksteal \
    -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true "${tests[@]}" "$@" || code=$?
if ! wait "$mypy"; then
    cat "$types"
    code=1
fi
exit "$code"
