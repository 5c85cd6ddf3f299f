"""The commands of ``ddp-equivalence``, one a file: ``add`` says what it takes, ``run`` does it."""
