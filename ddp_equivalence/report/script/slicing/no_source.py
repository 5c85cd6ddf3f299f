"""The error for everything that a script cannot contain."""

from __future__ import annotations


class NoSource(ValueError):
    """A value or name that cannot be written as source; the message says which and why."""
