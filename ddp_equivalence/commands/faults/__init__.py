"""``ddp-equivalence faults``: plant every fault and see whether it is caught and named."""
