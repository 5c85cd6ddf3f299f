"""Measured against expected gradients: by name, on every rank, within limits that have a reason."""
