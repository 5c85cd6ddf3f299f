"""Explains a difference between the measured gradients and the gradient of the big batch."""
