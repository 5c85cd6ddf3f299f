"""The verdict of a check, and its text: the report that a failing test shows."""
