"""Tests of ddp_equivalence/ranks."""
