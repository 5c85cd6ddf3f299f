"""Says of bad input on the command line what was typed and what would be right."""

from __future__ import annotations

import argparse
import re
import shlex

from ddp_equivalence.case.errors import BadCase, on_one_line


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
