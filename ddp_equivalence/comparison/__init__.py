"""Compare measured gradients with expected ones by name, on every rank, within stated limits."""
