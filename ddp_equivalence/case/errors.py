"""Errors for a case that the caller must change, and for a mistake in this package."""

from __future__ import annotations


class BadCase(ValueError):
    """The caller asked for something that cannot be checked.

    ``field`` is the argument at fault, ``value`` is what the caller gave, and ``right`` says what
    would be accepted instead.
    """

    def __init__(self, field: str, value: object, right: str) -> None:
        self.field, self.value, self.right = field, value, right
        super().__init__(f"{field} = {value!r}: {right}")

    def __reduce__(self) -> tuple[type[BadCase], tuple[str, str, str]]:
        # Errors cross processes by pickle, and the value may be an unpicklable function. So only
        # the text of the value is pickled.
        return type(self), (self.field, str(self.value), self.right)


class SuiteBug(RuntimeError):
    """This package itself has made a mistake. Please report it."""
