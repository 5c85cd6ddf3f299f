"""Begins the watch in a process of an observed script, when torch has just been imported."""

from __future__ import annotations

import os
from pathlib import Path

from ddp_equivalence.observed_scripts.told import VARIABLE, Told


def begin() -> None:
    """Do what this process was told in its environment."""
    from ddp_equivalence.observed_scripts.in_script import hooks
    from ddp_equivalence.observed_scripts.in_script.recorder import Recorder
    from ddp_equivalence.observed_scripts.in_script.replayer import Replayer
    from ddp_equivalence.observed_scripts.in_script.watch import Watch

    told = Told.read(Path(os.environ[VARIABLE]))
    options = told.options
    if options.as_cpu:
        from ddp_equivalence.observed_scripts.in_script.cuda_on_cpu import let_cuda_be_the_cpu

        let_cuda_be_the_cpu(options.as_cpu)
    if told.float64:
        hooks.compute_in_float64()
    if not options.dropout:
        hooks.drop_nothing()
    if told.working_folder:
        hooks.keep_files(told.working_folder)
    if told.role == "replay":
        hooks.let_sequences_be_unsorted()
    watch: Watch = Recorder(told) if told.role == "record" else Replayer(told)
    hooks.install(watch)
    if options.plant and told.role == "record":
        from ddp_equivalence.faults.plant import plant_here

        watch.planted = plant_here(options.plant)
        watch.planted.__enter__()  # until the process ends
