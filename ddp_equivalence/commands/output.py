"""What a command writes, what it keeps back, and how it ends when it is told to."""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn, TextIO, cast

from ddp_equivalence.case.errors import BadCase, on_one_line
from ddp_equivalence.commands.exit_codes import BAD_INPUT
from ddp_equivalence.report.text import FILE, FOLDER, HANDLER, why_no_file, why_no_folder, wrapped

# The streams of a command: nothing that happens to its output changes what it does.
#
# A character that the output lacks is replaced. If nobody reads on (``| head -1``), or if the
# disk is full, the command goes on without output, because its exit code and its files are
# results too.

STREAMS = ("stdin", "stdout", "stderr")
"""The names in ``sys`` of the streams with the file descriptors 0, 1 and 2."""


class Output:
    """Stands for a stream. ``error``: why it could not be written to, None if it could."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        if self.error is None:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._stop(error)
        return len(text)

    def flush(self) -> None:
        if self.error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._stop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _stop(self, error: OSError) -> None:
        """Send what is still to come, and what the stream holds, nowhere."""
        self.error = error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def output() -> Iterator[Output]:
    """Replace the streams in the block. Yields the standard output."""
    _open_closed_streams()
    before = sys.stdout, sys.stderr
    ours = Output(sys.stdout), Output(sys.stderr)
    errors = [_replace_characters(stream) for stream in before]
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in ours)
    try:
        yield ours[0]
    finally:
        for stream in ours:
            stream.flush()
        sys.stdout, sys.stderr = before
        for original, handler in zip(before, errors, strict=True):
            if handler is not None:
                _reconfigure(original, handler)


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that the caller has closed.

    Otherwise the next file that is opened gets its number, and is taken for the stream by others.
    """
    for number, name in enumerate(STREAMS):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)  # `run` becomes another program
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115, until the end
            setattr(sys, name, stream)


def _replace_characters(stream: TextIO) -> str | None:
    """Let the stream replace what it cannot encode. Returns its error handler, if it has one."""
    if not hasattr(stream, "reconfigure"):
        return None
    before = stream.errors
    _reconfigure(stream, HANDLER)
    return before


def _reconfigure(stream: Any, handler: str) -> None:
    stream.reconfigure(errors=handler)


# Keeps what the user's code prints in this process, so that it does not bury the report.

MOST_KEPT = 64 * 2**10
"""Characters that are kept of the output, the last ones."""


class KeptOutput(io.TextIOBase):
    """A stream that keeps the end of what is written. ``lines``: how many lines were written."""

    def __init__(self) -> None:
        self.lines = 0
        self._text = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.lines += text.count("\n")
        self._text = (self._text + text)[-MOST_KEPT:]
        return len(text)

    @property
    def text(self) -> str:
        """The last characters that were written."""
        return self._text

    def report(self, full: bool) -> str:
        """What was printed, below a line that says so, or one line that says how much it was.

        "" if nothing was printed.
        """
        if not self._text:
            return ""
        if full:
            return f"Your code printed in this process:\n{self._text}"
        lines = "a line" if self.lines <= 1 else f"{self.lines:,} lines"
        return f"  In this process your code printed {lines}, which --full shows.\n"


@contextmanager
def kept_output(unless: bool) -> Iterator[KeptOutput]:
    """Keep what is printed in the block. If the block raises an error, print it after all.

    ``unless``: keep nothing, because a debugger is to use the streams of this process.
    """
    kept = KeptOutput()
    try:
        with nullcontext() if unless else redirect_stdout(kept):
            yield kept
    except BaseException:
        print(kept.text, end="", file=sys.stderr)
        raise


# SIGTERM and SIGHUP end a command as Ctrl-C does: it removes its files and ends its processes.

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""What ends a command: a CI job that is cancelled, and a terminal that is closed."""

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


def _hear_interrupts() -> None:
    """A process that a shell has started in the background ignores them, and so would its child."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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
        preexec_fn=_hear_interrupts,
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


# Files and folders for results.
#
# A command asks whether it can write them before it starts its work, so that no result is lost.


def require_writable_file(field: str, path: Path | None) -> None:
    """Raises BadCase if a path is given and no file can be written there."""
    if path is not None and (reason := why_no_file(path)):
        raise BadCase(field, str(path), f"{FILE}; {reason}")


def require_writable_folder(field: str, path: Path | None) -> None:
    """Raises BadCase if a path is given that is not a writable folder and cannot become one."""
    if path is not None and (reason := why_no_folder(path)):
        raise BadCase(field, str(path), f"{FOLDER}; {reason}")


def write_json(field: str, path: Path | None, content: object) -> None:
    """Write the file if a path is given. Raises BadCase if that fails after all."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise BadCase(field, str(path), f"a file that can be written; {error.strerror}") from error


# Says of bad input on the command line what was typed and what would be right.

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
