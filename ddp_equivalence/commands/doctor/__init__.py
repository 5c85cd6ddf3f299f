"""``ddp-equivalence doctor``: what this machine can run, and why not the rest."""
