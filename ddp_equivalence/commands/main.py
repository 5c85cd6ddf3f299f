"""The command line: a thin front to the functions that the tests call."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from ddp_equivalence.case import settings
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands import COMMANDS
from ddp_equivalence.commands.exit_codes import BAD_INPUT, INTERRUPTED, NOT_JUDGED, SAME
from ddp_equivalence.commands.output import Parser, output, refusal, sigterm_interrupts
from ddp_equivalence.report.text import what_is_not_written, width_of


def main(command_line: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    ``command_line``: the arguments; None stands for those of this process. A command that has
    succeeded, but whose output could not be written, fails; that nobody reads it is no failure.
    """
    with output() as stdout:
        code = _run(command_line)
    if stdout.error is None or isinstance(stdout.error, BrokenPipeError):
        return code
    reason = stdout.error.strerror
    print(f"ddp-equivalence: the output could not be written: {reason}", file=sys.stderr)
    return NOT_JUDGED if code == SAME else code


def _run(command_line: Sequence[str] | None) -> int:
    parser = Parser(
        prog="ddp-equivalence",
        description="Does data-parallel training compute the gradients of one big batch?",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add(commands.add_parser(name, help=command.help))
    arguments, rest = parser.parse_known_args(command_line)
    if arguments.command in ("record", "matrix"):  # argparse takes no paths after the options
        arguments.paths += [word for word in rest if not word.startswith("-")]
        rest = [word for word in rest if word.startswith("-")]
    if arguments.command != "run":  # which gives them to pytest
        commands.choices[arguments.command].refuse(rest)
    arguments.rest = rest
    try:
        width = width_of(sys.stdout, settings.current().width)
        with sigterm_interrupts() as interruption, settings.using(settings.replaced(width=width)):
            code = COMMANDS[arguments.command].run(arguments)
        return INTERRUPTED if interruption.terminated else code
    except BadCase as error:
        text = refusal(error, commands.choices[arguments.command], arguments)
        print(f"ddp-equivalence {arguments.command}: bad input\n  {text}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        # The answer is neither "same" nor "different". Python's own exit code for an error is 1,
        # which would say "different".
        if text := what_is_not_written(error):
            print(f"ddp-equivalence {arguments.command}: {text}", file=sys.stderr)
            return BAD_INPUT
        traceback.print_exc()
        return NOT_JUDGED
    finally:
        _stop_ranks()


def _stop_ranks() -> None:
    """End the ranks here, and not in an atexit function, which Ctrl-C does not interrupt."""
    warm = sys.modules.get("ddp_equivalence.ranks.warm_ranks")
    if warm is not None:
        warm.warm_ranks().stop()


if __name__ == "__main__":
    raise SystemExit(main())
