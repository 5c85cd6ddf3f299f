"""Lines of code in the user's own files, also where a script runs in a copy made of links."""

from __future__ import annotations

import os
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

from ddp_equivalence.measurement.calls import CodeLine


@lru_cache(maxsize=4096)
def real_file(file: str) -> str:
    """The file that a link stands for."""
    return os.path.realpath(file) if os.path.islink(file) else file


def with_real_files(value: Any) -> Any:
    """The same dataclasses, tuples and dicts, with every line in its real file."""
    if isinstance(value, CodeLine):
        return replace(value, file=real_file(value.file))
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(map(with_real_files, value))
    if isinstance(value, dict):
        return {with_real_files(key): with_real_files(one) for key, one in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        new = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return replace(value, **{name: with_real_files(one) for name, one in new.items()})
    return value
