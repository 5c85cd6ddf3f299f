#!/usr/bin/env bash
# The GPU lane as a Slurm job on one node. Slurm starts one task: the suite starts the ranks itself.
#   ci/install.sh gpu                            first, on a login node, where there is a network
#   sbatch --gpus-per-node=8 ci/slurm.sh         then, in the folder of the checkout
# A job that Slurm ends at its time limit leaves no results. A run that is to end by itself, with its
# table, gets a deadline in seconds below the limit: sbatch ci/slurm.sh --ddp-run-deadline 3300
# Options of sbatch go before those of this file. Arguments after ci/slurm.sh go to pytest.
# This file was checked with shellcheck. It has not been run on a cluster yet.
#SBATCH --job-name=ddp_equivalence
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=01:00:00
#SBATCH --output=ddp_equivalence-%j.log
set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # Slurm runs a copy of this file, which lies elsewhere
export INSTALLED=1
export RESULTS="results-$SLURM_JOB_ID.json"
exec ci/gpu.sh "$@"
