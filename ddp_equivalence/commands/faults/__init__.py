"""``ddp-equivalence faults``: fault injection, to see every fault caught and named."""
