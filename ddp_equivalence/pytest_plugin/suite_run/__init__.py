"""What ``ddp-equivalence run`` shows before, during and after its tests, and other runs do not."""

SELECTION = "ddp_equivalence_selection"
"""The name under which ``selection.PairwiseSelection`` is registered."""

SUITE_RUN = "ddp_equivalence_suite_run"
"""The name under which ``plugin.SuiteRun`` is registered."""
