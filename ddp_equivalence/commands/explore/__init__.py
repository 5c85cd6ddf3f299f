"""Search for a case on which a promise does not hold, and shrink it to the smallest such case.

Drawing and shrinking are Hypothesis's; nothing here is imported before somebody explores.
"""
