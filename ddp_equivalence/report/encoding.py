"""Text for an output that may lack some of its characters, such as one that is ASCII only."""

from __future__ import annotations

import codecs
from typing import Any

INSTEAD = {
    "–": "-",
    "—": "-",
    "…": "...",
    "×": "x",
    "±": "+-",
    "≤": "<=",
    "≥": ">=",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
}
"""Character -> what an output gets that lacks it. Others are escaped, as in ``\\xe9``."""

HANDLER = "ddp_equivalence.instead"
"""The name of the error handler for ``str.encode`` and streams that does the same."""


def encodable(text: str, stream: object) -> str:
    """The text, with characters replaced that the stream lacks. Nothing is replaced for None."""
    encoding = getattr(stream, "encoding", None)
    if not isinstance(encoding, str) or text.isascii():
        return text
    try:
        return text.encode(encoding, HANDLER).decode(encoding)
    except (LookupError, UnicodeError):
        return text


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if character in INSTEAD:
        return INSTEAD[character], error.start + 1
    one = UnicodeEncodeError(
        error.encoding, error.object, error.start, error.start + 1, error.reason
    )
    escaped: Any = codecs.backslashreplace_errors(one)
    return escaped[0], error.start + 1


codecs.register_error(HANDLER, _replaced)
