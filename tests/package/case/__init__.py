"""Tests of ddp_equivalence/case."""
