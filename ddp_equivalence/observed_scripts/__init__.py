"""Observe a training script as it is: its ranks, and the same script in one process.

``script_observation`` is the flow on one page. ``in_script`` runs in the processes of the script,
everything else in the process that judges. The folder is not called ``observe``, because a module
of that name would hide the function ``ddp_equivalence.observe`` once it is imported.
"""
