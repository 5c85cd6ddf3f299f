"""Replaces a function of torch by one that is given it, in the process of an observed script."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ddp_equivalence.ranks.users_line import counts_as_torch


def around(owner: Any, name: str, by: Callable[..., Any]) -> None:
    """Let ``by(original, *arguments)`` run where this function of ``owner`` is called.

    What the script computes stays as it is, and frames of ``by`` count as torch's own.
    """
    original = getattr(owner, name)
    by = counts_as_torch(by)

    @functools.wraps(original)
    @counts_as_torch
    def replaced(*arguments: Any, **named: Any) -> Any:
        return by(original, *arguments, **named)

    setattr(owner, name, replaced)


def after(owner: Any, name: str, then: Callable[[Any], None]) -> None:
    """Let ``then`` be called with the object after each call of this method of a class."""

    def call(method: Any, self: Any, *arguments: Any, **named: Any) -> Any:
        result = method(self, *arguments, **named)
        then(self)
        return result

    around(owner, name, call)
