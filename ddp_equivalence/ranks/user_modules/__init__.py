"""Brings the ranks' imports of the user's modules into the state in which the caller has them.

A function of an importable module travels as its name, so a rank imports its module anew. What the
caller has set there since the module was imported would be lost. So a fresh process imports the
same modules, the caller compares its own with them, and sends what differs; the ranks apply it.
"""
