#!/usr/bin/env bash
# GPU lane, for a machine with one GPU or more: run the comparisons on NCCL and with the real nn.DataParallel.
# No case falls back to gloo on the CPU. Where there are fewer GPUs than ranks, ranks share them, and so do the
# replicas of nn.DataParallel; the table names these lanes (nccl_shared, data_parallel_shared). What this machine
# cannot run is skipped, and the table lists it as NOT RUN with the reason. The run fails if nothing was compared
# on one of the lanes on GPUs that this machine can run, and without a GPU.
# First `ddp-equivalence doctor` runs. If it ends with another exit code than 0, no test is started.
# As `ddp-equivalence run`, it runs the tests in which every pair of values of the catalogue occurs; on one H200 such
# a run took 260 s with a sketch of these lanes. ci/gpu.sh --all runs the rest, too.
# Other arguments go to pytest. The results are in results.json.
#   MUST_RUN="nccl gloo_cuda" ci/gpu.sh   demand these lanes instead, such as where only some tests run
#   PYTHON=python3 ci/gpu.sh              take torch from this Python, see ci/install.sh
#   INSTALLED=1 ci/gpu.sh                 ci/install.sh has run before; there may be no network now
set -euo pipefail
cd "$(dirname "$0")/.."
[[ -n "${INSTALLED:-}" ]] || ci/install.sh gpu
.venv/bin/ddp-equivalence doctor
must_run=()
for lane in ${MUST_RUN:-gpu}; do
    must_run+=(--must-run "$lane")
done
.venv/bin/ddp-equivalence run --json "${RESULTS:-results.json}" "${must_run[@]}" "$@"
