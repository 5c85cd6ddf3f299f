"""Small edits of a user's source, of which some may repair a step that differs.

``edits.py`` puts them together; ``rules.py`` is the table of all kinds of edits.
"""
