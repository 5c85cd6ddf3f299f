"""Tests of ``observe``: training scripts as they are."""
