"""``ddp-equivalence record``: write down what the suite and one's own checks show here."""
