"""Tests of ddp_equivalence/pytest_plugin."""
