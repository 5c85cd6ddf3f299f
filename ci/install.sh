#!/usr/bin/env bash
# Make .venv with the package and the locked versions of everything that it needs.
#   ci/install.sh            for a run of the suite
#   ci/install.sh test,lint  the same with the extras `test` and `lint`
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m venv .venv
.venv/bin/python -m pip install --quiet --constraint requirements.lock --editable ".${1:+[$1]}"
