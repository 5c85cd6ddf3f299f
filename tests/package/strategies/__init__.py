"""Tests of ddp_equivalence/strategies."""
