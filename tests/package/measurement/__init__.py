"""Tests of ddp_equivalence/measurement."""
