"""Reports are shown in colours on a terminal, and only there."""

from __future__ import annotations

import io
import socket

import pytest

from ddp_equivalence.report.text import GREEN, RED, Line, Link, Style, labelled, painted, width_of

REPORT = [
    Line("step is not big_batch: sum_not_mean", Style.BAD),
    Line(""),
    *labelled("Look at: ", "the divisor"),
]
PLAIN_TEXT = "step is not big_batch: sum_not_mean\n\n  Look at: the divisor\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_difference_is_red_on_a_terminal_and_its_words_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = painted(REPORT, Terminal())
    assert text.startswith(f"{RED}step is not big_batch: sum_not_mean")
    same = [Line("step is big_batch: same", Style.GOOD)]
    assert painted(same, Terminal()).startswith(GREEN)
    assert "\033[1m  Look at:\033[0m the divisor" in text


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_user_who_wants_no_colours_gets_none(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert painted(REPORT, Terminal()) == PLAIN_TEXT


@pytest.mark.parametrize(("no_color", "end"), [("", "\033[0m\n"), ("1", "\033]8;;\033\\): oh\n")])
def test_a_terminal_can_open_the_line_that_a_report_names(
    no_color: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    line = Line("step (mine.py:3): oh", Style.BAD, link=Link("mine.py:3", "/a folder/mine.py", 3))
    text = painted([line], Terminal())
    host = socket.gethostname()
    address = f"\033]8;;file://{host}/a%20folder/mine.py#3\033\\mine.py:3\033]8;;\033\\"
    assert address in text
    assert text.endswith(end)
    assert painted([line], io.StringIO()) == "step (mine.py:3): oh\n"


def test_a_file_gets_no_colours_and_the_width_that_is_given() -> None:
    assert painted(REPORT, io.StringIO()) == PLAIN_TEXT
    assert width_of(io.StringIO(), 96) == 96


@pytest.mark.parametrize(("columns", "expected"), [(40, 72), (100, 100), (400, 140)])
def test_the_width_is_that_of_the_terminal_within_reason(
    columns: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert width_of(Terminal(), 96) == expected
