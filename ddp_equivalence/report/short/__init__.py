"""The report of a difference on one screen: what is wrong, in which line, and what to write."""
