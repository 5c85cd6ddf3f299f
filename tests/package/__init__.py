"""The suite checked against itself."""
