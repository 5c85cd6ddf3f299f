"""Tests of ddp_equivalence/commands/explore."""
