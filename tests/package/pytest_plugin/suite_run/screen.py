"""A terminal's screen, as far as pytest and the line of progress use it."""

from __future__ import annotations

import re

TOKEN = re.compile(r"\x1b\[(?P<number>\d*)(?P<letter>[AGKm])|\x1b\[[\d;]*m|(?P<text>[^\x1b])", re.S)


class Screen:
    """Rows of characters, of which the last ``height`` can be written to."""

    def __init__(self, width: int, height: int) -> None:
        self._width, self._height = width, height
        self._rows: list[list[str]] = [[]]
        self._row = self._column = 0

    def write(self, text: str) -> None:
        position = 0
        while position < len(text):
            token = TOKEN.match(text, position)
            assert token is not None, (
                f"not known to this screen: {text[position : position + 20]!r}"
            )
            position = token.end()
            if token["text"] is not None:
                self._character(token["text"])
            elif token["letter"] is not None:
                self._control(token["letter"], int(token["number"] or 1))

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._rows]

    def _character(self, character: str) -> None:
        if character == "\n":
            self._down()
        elif character == "\r":
            self._column = 0
        else:
            if self._column == self._width:  # a terminal wraps before it writes
                self._column = 0
                self._down()
            row = self._rows[self._row]
            row += " " * (self._column + 1 - len(row))
            row[self._column] = character
            self._column += 1

    def _control(self, letter: str, number: int) -> None:
        if letter == "A":
            self._row = max(self._row - number, len(self._rows) - self._height, 0)
        elif letter == "G":
            self._column = number - 1
        elif letter == "K":
            assert number == 2, "only whole rows are erased"
            self._rows[self._row] = []

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append([])
