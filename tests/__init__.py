"""The suite: what is the same, what is known to differ, and the suite checked against itself."""
