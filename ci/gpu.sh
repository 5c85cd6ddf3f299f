#!/usr/bin/env bash
# GPU lane, for a machine with GPUs: run the comparisons on NCCL and with the real nn.DataParallel.
# NCCL may not fall back to gloo. A case that needs more GPUs than there are is skipped, and the
# table lists it as NOT RUN. The run fails if nothing was compared on one of the two lanes, and its
# table says in one line what the machine lacks: nn.DataParallel needs two GPUs.
# First `ddp-equivalence doctor` runs. If it ends with another exit code than 0, no test is started.
# Arguments go to pytest. The results are in results.json.
#   MUST_RUN="nccl gloo_cuda" ci/gpu.sh   other lanes, such as those that one GPU is enough for
#   PYTHON=python3 ci/gpu.sh              take torch from this Python, see ci/install.sh
#   INSTALLED=1 ci/gpu.sh                 ci/install.sh has run before; there may be no network now
set -euo pipefail
cd "$(dirname "$0")/.."
[[ -n "${INSTALLED:-}" ]] || ci/install.sh gpu
.venv/bin/ddp-equivalence doctor
must_run=()
for lane in ${MUST_RUN:-nccl data_parallel}; do
    must_run+=(--must-run "$lane")
done
.venv/bin/ddp-equivalence run --all --json "${RESULTS:-results.json}" "${must_run[@]}" "$@"
