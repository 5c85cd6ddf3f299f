"""Tests of what ``ddp-equivalence run`` shows."""
