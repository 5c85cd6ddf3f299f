"""``ddp-equivalence explain``: its arithmetic, its text, and what ranks make of it."""
