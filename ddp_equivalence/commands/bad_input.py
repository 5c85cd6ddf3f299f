"""Says of bad input on the command line what was typed and what would be right."""

from __future__ import annotations

import argparse
import re
import shlex
from difflib import get_close_matches
from typing import NoReturn

from ddp_equivalence.case.errors import BadCase, on_one_line
from ddp_equivalence.commands.exit_codes import BAD_INPUT
from ddp_equivalence.report.wrapping import wrapped

ABOUT_AN_OPTION = re.compile(r"argument (?P<option>[^\s/:]+)[^\s:]*: (?P<what>.*)", re.DOTALL)
NOT_WHOLE = re.compile(r"(?P<option>\S+) invalid int value: '(?P<value>.*)'", re.DOTALL)
NO_CHOICE = re.compile(
    r"(?P<option>\S+) invalid choice: '(?P<value>.*)' \(choose from (?P<choices>.*)\)", re.DOTALL
)
"""What argparse says. Another wording of it is printed as it is."""


class Parser(argparse.ArgumentParser):
    """Says in two lines what is wrong, where argparse prints all options before it."""

    def error(self, message: str) -> NoReturn:
        if found := ABOUT_AN_OPTION.fullmatch(message):
            message = f"{found['option']} {found['what']}"
        if found := NOT_WHOLE.fullmatch(message):
            message = f"{found['option']} {_shown(found['value'])} should be a whole number"
        elif found := NO_CHOICE.fullmatch(message):
            choices = found["choices"].replace("'", "")
            message = f"{found['option']} {_shown(found['value'])} should be one of {choices}"
        text = f"{message.rstrip('.')}. See {self.prog} --help."
        self.exit(BAD_INPUT, "\n".join([f"{self.prog}: bad input", *wrapped(text, "  ", "  "), ""]))


def refuse_unknown(parser: argparse.ArgumentParser, words: list[str]) -> NoReturn:
    """End with an error that names the options that are most like these, or all."""
    options = [one[2:] for one in parser._option_string_actions if one.startswith("--")]
    typed = [word.partition("=")[0].lstrip("-") for word in words if word.startswith("-")]
    close = [one for word in typed for one in get_close_matches(word, options, 2)]
    right = f"perhaps --{' or --'.join(close)}" if close else f"there are --{', --'.join(options)}"
    parser.error(f"unrecognized arguments: {' '.join(map(_shown, words))} ({right})")


def refusal(error: BadCase, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """``--nodes 2 should be 1: ...`` if the field was given as an option or argument.

    For any other field, such as one of a user's own Case, it is the text of the error. ``parser``:
    that of the command.
    """
    for action in parser._actions:  # argparse names them in no public way
        if error.field not in _names(action):
            continue
        given = getattr(arguments, action.dest, None)
        option = max(action.option_strings, key=len, default="")
        if error.value is None and given is None:
            return f"{option} is missing: {error.right}"
        if given == action.default or (action.nargs == 0 and given is not action.const):
            continue  # it comes from elsewhere, or from the switch that says the opposite
        typed = [option] if option else []
        if action.nargs != 0:
            typed.append(_shown(given if isinstance(given, str) else error.value))
        return f"{' '.join(typed)} should be {error.right}"
    return str(error)


def _names(action: argparse.Action) -> set[str]:
    """What errors call this option or argument."""
    options = {one.lstrip("-").replace("-", "_") for one in action.option_strings}
    shown = action.metavar if isinstance(action.metavar, str) else ""
    return {action.dest, re.split(r"\W", shown)[0], *options} - {""}


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return on_one_line(" ".join(map(_shown, value)))
    return on_one_line(shlex.quote(value) if isinstance(value, str) else str(value))
