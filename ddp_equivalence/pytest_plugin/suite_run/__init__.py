"""What ``ddp-equivalence run`` shows before, during and after its tests. Other runs show none of it."""
