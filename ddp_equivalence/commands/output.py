"""The output of a command, what it keeps back, bad input, and how it ends when it is told to."""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn, TextIO, cast

from ddp_equivalence.case.errors import BadCase, Words, on_one_line, one_of
from ddp_equivalence.commands.exit_codes import BAD_INPUT
from ddp_equivalence.report.text import HANDLER, wrapped

# The streams of a command: nothing that happens to its output changes what it does.
#
# A character that the output lacks is replaced. If nobody reads on (``| head -1``), or if the
# disk is full, the command goes on without output, because its exit code and its files are
# results too.


class Output:
    """Stands for a stream. ``error``: why it could not be written to, None if it could."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, act: Callable[[], object]) -> None:
        """After an error, send what is still to come, and what the stream holds, nowhere."""
        if self.error is not None:
            return
        try:
            act()
        except OSError as error:
            self.error = error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextmanager
def output() -> Iterator[Output]:
    """Replace the streams in the block. Yields the standard output."""
    before: tuple[Any, Any] = sys.stdout, sys.stderr
    handlers = [getattr(stream, "errors", None) for stream in before]
    ours = Output(sys.stdout), Output(sys.stderr)
    _replace_characters(before, [HANDLER, HANDLER])
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in ours)
    try:
        yield ours[0]
    finally:
        for stream in ours:
            stream.flush()
        sys.stdout, sys.stderr = before
        _replace_characters(before, handlers)


def _replace_characters(streams: Sequence[Any], handlers: Sequence[str | None]) -> None:
    for stream, handler in zip(streams, handlers, strict=True):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=handler)


# Keeps what the user's code prints in this process, so that it does not bury the report.

MOST_KEPT = 64 * 2**10
"""Characters that are shown of the output, the last ones."""


@contextmanager
def kept_output(unless: bool) -> Iterator[io.StringIO]:
    """Keep what is printed in the block. If the block raises an error, print it after all.

    ``unless``: keep nothing, because a debugger is to use the streams of this process.
    """
    kept = io.StringIO()
    try:
        with nullcontext() if unless else redirect_stdout(kept):
            yield kept
    except BaseException:
        print(kept.getvalue()[-MOST_KEPT:], end="", file=sys.stderr)
        raise


def report_of_kept(text: str, full: bool) -> str:
    """The text below a line that says what it is, or one line that says how much was printed."""
    if full and text:
        return f"Your code printed in this process:\n{text[-MOST_KEPT:]}"
    count = text.count("\n")
    lines = "a line" if count <= 1 else f"{count:,} lines"
    return f"  In this process your code printed {lines}, which --full shows.\n" if text else ""


# SIGTERM and SIGHUP end a command as Ctrl-C does: it removes its files and ends its processes.

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""The signals that end a command: of a CI job that is cancelled, and a terminal that is closed."""

SECONDS_TO_END = 20.0
"""A process that is interrupted has so much time to end its own processes."""


class Terminated(KeyboardInterrupt):
    """This process got one of ``SIGNALS``."""


@dataclass
class Interruption:
    """``terminated``: a signal has come, whoever has caught its error since."""

    terminated: bool = False


@contextmanager
def sigterm_interrupts() -> Iterator[Interruption]:
    """In the block, ``SIGNALS`` raise Terminated, where the program gave them no other meaning.

    Further ones are ignored, since the first one is being followed: ``timeout`` sends two. In a
    fork of this process, such as a worker of the user's, they mean what they mean elsewhere.
    """
    found, here = Interruption(), os.getpid()
    is_main = threading.current_thread() is threading.main_thread()
    ours = [one for one in SIGNALS if is_main and signal.getsignal(one) is signal.SIG_DFL]

    def terminate(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != here:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not found.terminated:
            found.terminated = True
            raise Terminated

    for one in ours:
        signal.signal(one, terminate)
    try:
        yield found
    finally:
        if not found.terminated:  # else what follows cleans up
            for one in ours:
                signal.signal(one, signal.SIG_DFL)


def exit_code_of(
    command: Sequence[str],
    at: Path | None = None,
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
    seconds_to_end: float = SECONDS_TO_END,
) -> int:
    """Run a command and wait for it. If this process is interrupted, so is the command.

    It has a process group of its own: a signal to the group of this process, as from Ctrl-C or from
    ``timeout``, would otherwise reach it a second time, or end it before it can clean up. ``at``:
    its folder. ``output``: where all goes that it prints. None: as in this process.
    ``seconds_to_end``: it is killed then.
    """
    with subprocess.Popen(
        command,
        cwd=at,
        env=environment,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        process_group=0,
        # What a shell has started in the background ignores interrupts, and so would its child.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as child:
        try:
            return child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(seconds_to_end)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                child.kill()
            raise


# Bad input on the command line.


ALONE = re.compile("argument (.+): expected (.+)")
NUMBERS: Mapping[Any, str] = {int: "a whole number", float: "a number"}


class Parser(argparse.ArgumentParser):
    """Says in a few lines what is wrong, where argparse prints all options before it."""

    def error(self, message: str) -> NoReturn:
        message = ALONE.sub(r"\1 is without a value; it should be followed by \2", message)
        end = "" if message.endswith("?") else "."
        text = f"{message.rstrip('.')}{end} See {self.prog} --help."
        self.exit(BAD_INPUT, "\n".join([f"{self.prog}: bad input", *wrapped(text, "  ", "  "), ""]))

    def refuse(self, words: Sequence[str]) -> None:
        """Ends the process if there are words which no argument takes."""
        for word in words:
            options = [one for one in self._option_string_actions if word.startswith("-")]
            near = one_of(options, word.partition("=")[0]).partition(";")[2]
            self.error(f"{word} is no argument of {self.prog}" + (near and f";{near}"))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            self._refuse_value(action, value, one_of(map(str, action.choices), value))

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError:
            if action.type not in NUMBERS:
                raise
            self._refuse_value(action, text, NUMBERS[action.type])

    def _refuse_value(self, action: argparse.Action, value: object, right: str) -> NoReturn:
        name = action.option_strings[-1] if action.option_strings else action.metavar
        self.error(f"{name} is {_shown(value)}; it should be {right}")


def refusal(error: BadCase, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """``--nodes is 2; it should be 1: ...`` if the field was given as an option or argument.

    For any other field, such as one of a user's own Case, it is the text of the error. ``parser``:
    that of the command.
    """
    for action in parser._actions:  # argparse names them in no public way
        option = max(action.option_strings, key=len, default="")
        shown = action.metavar if isinstance(action.metavar, str) else ""
        names = {action.dest, re.split(r"\W", shown)[0]}
        names |= {one.lstrip("-").replace("-", "_") for one in action.option_strings}
        if error.field not in names - {""}:
            continue
        given = getattr(arguments, action.dest, None)
        if error.value is None and not given:
            return f"{option or shown} is missing; it should be {error.right}"
        if given == action.default or (action.nargs == 0 and given is not action.const):
            continue  # it comes from elsewhere, or from the switch that says the opposite
        value = given if isinstance(given, str) else error.value
        is_so = "" if action.nargs == 0 else f" is {_shown(value)}; it"
        return f"{option or error.field}{is_so} should be {error.right}"
    return str(error)


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return on_one_line(" ".join(map(_shown, value)))
    is_given = isinstance(value, str) and not isinstance(value, Words)
    return on_one_line(shlex.quote(str(value)) if is_given else str(value))
