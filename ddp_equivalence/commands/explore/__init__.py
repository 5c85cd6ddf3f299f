"""Search random cases for one on which a promise fails, and shrink it to the smallest such case.

Hypothesis draws and shrinks the cases. It is imported only when a search starts.
"""
