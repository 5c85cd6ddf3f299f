"""``ddp-equivalence faults``: inject every known fault, and see whether it is caught and named."""
