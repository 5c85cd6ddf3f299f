"""The commands of ``ddp-equivalence``, one a file."""
