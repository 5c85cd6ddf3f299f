#!/usr/bin/env bash
# Make .venv with the package, and the locked versions of all that its tests use.
#   ci/install.sh            what a run of the suite needs
#   ci/install.sh test,lint  and these extras
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m venv .venv
.venv/bin/python -m pip install --quiet --constraint requirements.lock --editable ".${1:+[$1]}"
