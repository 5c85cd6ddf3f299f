#!/usr/bin/env bash
# GPU lane, for a machine with GPUs: run the comparisons on NCCL and with the real nn.DataParallel.
# NCCL may not fall back to gloo. A case that needs more GPUs than there are is skipped, and the
# table lists it as NOT RUN. The run fails if nothing was compared on one of the two lanes, and its
# last lines say what the machine lacks: nn.DataParallel needs two GPUs.
#   MUST_RUN="nccl gloo_cuda" ci/gpu.sh    other lanes, for example those of a machine with one GPU
#   PYTHON=/opt/conda/bin/python ci/gpu.sh  use the torch that this Python has: see ci/install.sh
# Arguments go to pytest. The results are in results.json.
set -euo pipefail
cd "$(dirname "$0")/.."
ci/install.sh
.venv/bin/ddp-equivalence doctor
must_run=()
for lane in ${MUST_RUN:-nccl data_parallel}; do
    must_run+=(--must-run "$lane")
done
.venv/bin/ddp-equivalence run --json results.json "${must_run[@]}" "$@"
