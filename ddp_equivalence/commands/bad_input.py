"""Says of bad input on the command line what was typed and what would be right."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, NoReturn

from ddp_equivalence.case.errors import BadCase, on_one_line
from ddp_equivalence.commands.exit_codes import BAD_INPUT
from ddp_equivalence.report.wrapping import wrapped

ABOUT_AN_OPTION = re.compile(r"argument (?P<options>[^\s:]+): (?P<what>.*)", re.DOTALL)
REQUIRED = "the following arguments are required: "
REWORDED = {
    r"invalid int value: (?P<value>.*)": "should be a whole number",
    r"invalid float value: (?P<value>.*)": "should be a number",
    r"invalid choice: (?P<value>.*) \(choose from (?P<more>.*)\)": "should be one of",
    r"expected one argument": "needs a value",
    r"expected at least one argument": "needs at least one value",
    r"not allowed with argument (?P<more>.*)": "cannot be given together with",
    r"ignored explicit argument (?P<value>.*)": "takes no value",
}
"""What argparse says after the option, and what is said instead. Other words are left as they are.
"""


class Parser(argparse.ArgumentParser):
    """Says in a few lines what is wrong, where argparse prints all options before it."""

    typed: Sequence[str] = ()
    """The words that the parser was last given."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.typed = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if message.startswith(REQUIRED) and (unknown := self._unknown()):
            refuse_unknown(self, unknown)  # it may well be what is missing
        if found := ABOUT_AN_OPTION.fullmatch(message):
            option = as_typed(found["options"].split("/"), self)
            message = f"{option} {_reworded(found['what'])}"
        text = f"{message.rstrip('.')}. See {self.prog} --help."
        self.exit(BAD_INPUT, "\n".join([f"{self.prog}: bad input", *wrapped(text, "  ", "  "), ""]))

    def _unknown(self) -> list[str]:
        """The options that were typed and that there are not."""
        typed = (word.partition("=")[0] for word in self.typed if word.startswith("--"))
        known = self._option_string_actions  # argparse names them in no public way
        return [word for word in typed if not any(one.startswith(word) for one in known)]


def _reworded(what: str) -> str:
    for pattern, says in REWORDED.items():
        if found := re.fullmatch(pattern, what, re.DOTALL):
            groups = found.groupdict()
            value, more = groups.get("value", ""), groups.get("more", "").replace("'", "")
            with suppress(ValueError, SyntaxError):
                value = _shown(ast.literal_eval(value)) if value else ""
            return " ".join(word for word in (value, says, more) if word)
    return what


def as_typed(options: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """The option in the words of the command line, which may shorten it; else its longest name."""
    typed = (word.partition("=")[0] for word in getattr(parser, "typed", ()))
    others = parser._option_string_actions.keys() - set(options)
    given = [
        word
        for word in typed
        if len(word) > 2 and word not in others and any(one.startswith(word) for one in options)
    ]
    return given[-1] if given else max(options, key=len, default="")


def refuse_unknown(parser: argparse.ArgumentParser, words: list[str]) -> NoReturn:
    """End with an error that names the options that are most like these, or all."""
    options = [one[2:] for one in parser._option_string_actions if one.startswith("--")]
    typed = [word.partition("=")[0].lstrip("-") for word in words if word.startswith("-")]
    close = [one for word in typed for one in get_close_matches(word, options, 2)]
    right = ""
    if close:
        right = f" (perhaps --{' or --'.join(close)})"
    elif typed:
        right = f" (there are --{', --'.join(options)})"
    parser.error(f"unrecognized arguments: {' '.join(map(_shown, words))}{right}")


def refusal(error: BadCase, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """``--nodes 2 should be 1: ...`` if the field was given as an option or argument.

    For any other field, such as one of a user's own Case, it is the text of the error. ``parser``:
    that of the command.
    """
    for action in parser._actions:  # argparse names them in no public way
        if error.field not in _names(action):
            continue
        given = getattr(arguments, action.dest, None)
        option = as_typed(action.option_strings, parser)
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
