"""The sandbox: its figures, and that a wrong one is noticed."""
