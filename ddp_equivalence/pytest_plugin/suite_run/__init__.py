"""What ``ddp-equivalence run`` shows before, during and after its tests, and other runs do not."""
