"""Reads what an object holds in its attributes, as pickle would."""

from __future__ import annotations

import copyreg
from collections import Counter, OrderedDict, defaultdict
from typing import Any

from ddp_equivalence.ranks.user_modules.paths import FIELD, SLOT, Step


def fields_of(value: Any) -> list[tuple[Step, Any]]:
    """Everything in the object's ``__dict__`` and slots."""
    fields = getattr(value, "__dict__", {})
    held: list[tuple[Step, Any]] = [((FIELD, name), fields[name]) for name in fields]
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # pickle uses it too
    for name in names:
        try:
            held.append(((SLOT, name), object.__getattribute__(value, name)))
        except AttributeError:  # the slot has no value
            continue
    return held


def has_plain_state(value: Any) -> bool:
    """True if the object is pickled as its ``__dict__`` and slots, and perhaps its items."""
    cls: Any = type(value)
    plain: Any = object
    return (
        cls.__reduce_ex__ is plain.__reduce_ex__
        and cls.__reduce__ in _PLAIN_REDUCE
        and cls.__getstate__ is plain.__getstate__
        and cls not in copyreg.dispatch_table
        and not any(hasattr(cls, name) for name in ("__getnewargs__", "__getnewargs_ex__"))
    )


_PLAIN_REDUCE = tuple(cls.__reduce__ for cls in (object, OrderedDict, defaultdict, Counter))
"""How objects are pickled whose items and ``__dict__`` are all that they hold."""
