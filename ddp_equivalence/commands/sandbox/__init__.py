"""The published sandbox: one neuron, L1 loss, one epoch, on one process or on many ranks."""
