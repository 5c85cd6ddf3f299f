"""Tests of ddp_equivalence/diagnosis/repairs."""
