"""Replace an attribute of torch for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def patched(owner: object, name: str, value: object) -> Iterator[None]:
    """``owner.name`` is ``value`` inside the block, and what it was before afterwards."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
