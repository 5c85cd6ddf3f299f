"""A node is the description of one value, as plain data that another process can compare."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ddp_equivalence.ranks.user_modules.paths import Step

Node = tuple[str, Hashable, tuple[tuple[Step, Any], ...]]
"""(Kind, what is compared, the nodes of what it holds by step)."""

CONSTANT, SEEN, NAMED, FUNCTION, CLASS, PART_OF_CLASS, MODULE = (
    *("constant", "seen", "named", "function", "class", "part of class", "module"),
)
DICT, LIST, TUPLE, SET, MANY, OBJECT, TENSOR, DIGEST, KEPT = (
    *("dict", "list", "tuple", "set", "many", "object", "tensor", "digest", "kept"),
)
"""The kinds of nodes. ``SEEN``: the object was already described, under the path that is compared.

``MANY``: a long container of constants. ``KEPT``: an object that cannot be pickled.
"""
