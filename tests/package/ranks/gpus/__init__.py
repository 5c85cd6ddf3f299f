"""Tests of ranks/gpus/."""
