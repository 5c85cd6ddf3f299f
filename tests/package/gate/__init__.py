"""Tests of ddp_equivalence/gate."""
