"""Begins the watch in a process of an observed script, when torch has just been imported."""

from __future__ import annotations

import os
from pathlib import Path

from ddp_equivalence.observed_scripts.queries import VARIABLE, Instructions


def begin() -> None:
    """Do what this process was told in its environment."""
    from ddp_equivalence.observed_scripts.in_script import script_changes
    from ddp_equivalence.observed_scripts.in_script.kept_tensors import send_real_files
    from ddp_equivalence.observed_scripts.in_script.recorder import Recorder
    from ddp_equivalence.observed_scripts.in_script.replayer import Replayer
    from ddp_equivalence.observed_scripts.in_script.watch import Watch, install

    instructions = Instructions.read(Path(os.environ[VARIABLE]))
    options = instructions.options
    if options.as_cpu:
        from ddp_equivalence.observed_scripts.in_script.cuda_on_cpu import let_cuda_be_the_cpu

        let_cuda_be_the_cpu(options.as_cpu)
    if instructions.float64:
        script_changes.compute_in_float64()
    if not options.dropout:
        script_changes.drop_nothing()
    if instructions.working_folder:
        script_changes.keep_files(instructions.working_folder)
        send_real_files()
    if instructions.role == "replay":
        script_changes.let_sequences_be_unsorted()
    watch: Watch = (
        Recorder(instructions) if instructions.role == "record" else Replayer(instructions)
    )
    install(watch)
    if options.plant and instructions.role == "record":
        from ddp_equivalence.faults.plant import plant_here

        watch.planted = plant_here(options.plant)
        watch.planted.__enter__()  # until the process ends
