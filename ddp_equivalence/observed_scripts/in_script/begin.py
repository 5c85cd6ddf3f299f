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
    if told.devices_on_cpu:
        from ddp_equivalence.observed_scripts.in_script.cuda_on_cpu import let_cuda_be_the_cpu

        let_cuda_be_the_cpu(told.devices_on_cpu)
    if told.float64:
        hooks.compute_in_float64()
    if told.without_dropout:
        hooks.drop_nothing()
    if told.working_folder:
        hooks.keep_files(told.working_folder)
    if told.role == "replay":
        hooks.let_sequences_be_unsorted()
    watch: Watch = Recorder(told) if told.role == "record" else Replayer(told)
    hooks.install(watch)
    if told.plant:
        from ddp_equivalence.faults.plant import plant_here

        watch.planted = plant_here(told.plant)
        watch.planted.__enter__()  # until the process ends
