"""Pickles functions by value, with the names of the files that they stand in.

cloudpickle 3.1.3 leaves these names out. Without them nothing that happens in such a function has a
line: neither a fault that a report shows, nor the lines of a traceback.

Source: cloudpickle 3.1.3, ``_code_reduce``, where every file is called ``<dynamic-code>``.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from types import CodeType
from typing import Any

import cloudpickle


class CloudPicklerWithFiles(cloudpickle.CloudPickler):  # type: ignore[misc]  # it is not typed
    """Pickles code together with the name of its file, whatever version of cloudpickle this is."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is CodeType:
            make, arguments = self.dispatch_table[CodeType](value)
            return _code_in_file, (make, arguments, value.co_filename)
        return super().reducer_override(value)


def dumps_with_files(value: object) -> bytes:
    """What ``cloudpickle.loads`` makes the object of."""
    file = BytesIO()
    CloudPicklerWithFiles(file).dump(value)
    return file.getvalue()


def _code_in_file(make: Callable[..., CodeType], arguments: Any, file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)
