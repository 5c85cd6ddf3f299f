#!/usr/bin/env bash
# GPU lane, for a machine with two or more GPUs: run the comparisons on NCCL and with the real
# nn.DataParallel. It fails if nothing was compared on one of them. NCCL may not fall back to gloo.
# Arguments go to pytest. The results are in results.json.
set -euo pipefail
cd "$(dirname "$0")/.."
ci/install.sh
.venv/bin/ddp-equivalence doctor
.venv/bin/ddp-equivalence run --json results.json --must-run nccl --must-run data_parallel "$@"
