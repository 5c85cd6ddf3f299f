"""Every error the package raises, by who is at fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


class BadCase(ValueError):
    """The caller asked for something that cannot be checked.

    Names the ``field``, its ``value`` and what would be ``right``.
    """

    def __init__(self, field: str, value: object, right: str) -> None:
        self.field, self.value, self.right = field, value, right
        super().__init__(f"{field} = {value!r}: {right}")

    def __reduce__(self) -> tuple[type[BadCase], tuple[str, str, str]]:
        # The value may be anything, an unpicklable function too: its text travels.
        return type(self), (self.field, str(self.value), self.right)


class SuiteBug(RuntimeError):
    """The suite itself is wrong; please report it."""
