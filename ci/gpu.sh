#!/usr/bin/env bash
# GPU lane, for a box with two or more GPUs: the comparisons on NCCL and the real nn.DataParallel,
# where falling back or skipping is a failure. Arguments go to pytest; results in results.json.
set -euo pipefail
cd "$(dirname "$0")/.."
ci/install.sh
.venv/bin/ddp-equivalence doctor
.venv/bin/ddp-equivalence run --json results.json --must-run nccl --must-run data_parallel "$@"
