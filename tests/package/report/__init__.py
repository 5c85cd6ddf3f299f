"""Tests of ddp_equivalence/report."""
