"""Finds the lines of the user's code that show how a cause came about."""
