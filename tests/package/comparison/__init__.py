"""Tests of ddp_equivalence/comparison."""
