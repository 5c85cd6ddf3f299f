"""Defects of released torch, one a file. The tests say whether the installed torch has them."""
