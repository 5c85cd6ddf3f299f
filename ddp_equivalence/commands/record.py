"""``ddp-equivalence record``: write down what the suite and one's own checks show here."""

from __future__ import annotations

import argparse
import datetime
import errno
import hashlib
import os
import resource
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import DIFFERENT, NOT_JUDGED, SAME
from ddp_equivalence.commands.output import exit_code_of
from ddp_equivalence.commands.suite_folder import OPTIONS_OF_SUITE, cache_folder, suite_folder
from ddp_equivalence.gate.record import CANNOT_WRITE, NAME, OF_SUITE, SCHEMA, Recorded, RecordWriter
from ddp_equivalence.report.text import NotWritten, require_writable_folder

NOTHING_COLLECTED = 5
"""Pytest's exit code where there is no test."""

HELP = "write down what the suite and your own checks show here, for `gate`"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of the command."""
    parser.description = (
        "Run the suite and your own checks, and write a record of verdicts, errors, "
        "digests of gradients, times, defaults and versions. `ddp-equivalence gate OLD NEW` holds "
        "one record against another. Exit code 0: everything passed, 1: something failed, 2: bad "
        "input, 3: the run was cut off."
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write; must not exist")
    parser.add_argument(
        "--no-suite", dest="suite", action="store_false", help="leave the suite out"
    )
    add_checks(parser)


def add_checks(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is run, beside whether the suite is."""
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="*",
        help="your own checks: a file or folder of tests (test_*.py), or a file for `check`, "
        "FILE.py or FILE.py:NAME",
    )
    parser.add_argument(
        "--observe",
        action="append",
        default=[],
        metavar="COMMAND",
        help="a training command to observe, such as 'torchrun --nproc-per-node 2 train.py'; may "
        "be repeated",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="run all tests of the suite, and not only a selection in which every pair of its "
        "strategies, layouts, models ... occurs",
    )
    parser.add_argument(
        "-n", default="0", metavar="N", help="run so many tests at a time, as `pytest -n` does"
    )
    parser.add_argument(
        "-k",
        default="",
        metavar="WORDS",
        help="only the tests and checks that these words select, of all that are given",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the record. Raises BadCase for input that cannot be right, before anything runs."""
    out: Path = arguments.out
    if out.exists():
        raise BadCase("OUT", str(out), "a folder that does not exist yet: no record is mixed")
    require_writable_folder("OUT", out)
    every = [*arguments.paths, *arguments.observe]
    twice = next((text for text in every if every.count(text) > 1), None)
    if twice is not None:
        raise BadCase("PATH", twice, "given once")
    if not arguments.n.isdecimal() and arguments.n not in ("auto", "logical"):
        raise BadCase("n", arguments.n, "a number of workers, or auto")
    if not (arguments.suite or every):
        raise BadCase("PATH", None, "checks of your own beside --no-suite")
    paths = [given(text) for text in arguments.paths]
    out.mkdir(parents=True)
    path = (out / NAME).resolve()
    started = time.monotonic()
    try:
        _write_begin(RecordWriter(path), arguments)
    except NotWritten:
        shutil.rmtree(out)
        raise
    codes = list(_runs(arguments, paths, path))
    if CANNOT_WRITE in codes:
        raise NotWritten(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out / NAME))
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    RecordWriter(path).write(  # a writer goes on after the lines that it found at its start
        "end",
        exit_codes=codes,
        seconds=round(time.monotonic() - started, 1),
        peak_mib=round(largest / 1024, 1),
    )
    print(f"This run is recorded in {out}. To compare it: ddp-equivalence gate OLD {out}")
    if arguments.k and set(codes) != {NOTHING_COLLECTED}:
        codes = [code for code in codes if code != NOTHING_COLLECTED]
    if set(codes) <= {0}:
        return SAME
    return DIFFERENT if set(codes) <= {0, 1} else NOT_JUDGED


def record_again(earlier: Recorded, out: Path, workers: str, commands: Sequence[str]) -> None:
    """Record what an earlier record is of, here and now.

    ``commands``: those of it that may be run. A record may come from somebody else: it does not
    decide alone which commands are run, or which files outside this folder. Raises BadCase.
    """
    paths, observed = earlier.asked_for("paths"), earlier.asked_for("observed")
    if not earlier.suite:
        raise BadCase("record", earlier.name, "a record that says what it is of: record it again")
    for path in paths:
        if not Path(path.partition(":")[0]).resolve().is_relative_to(Path.cwd()):
            right = "one of files in this folder: call `record` yourself for others"
            raise BadCase("record", earlier.name, f"{right}; this one is of {path!r}")
    if sorted(observed) != sorted(commands):
        right = "the commands of the record, each of which will be run: "
        words = " ".join(f"--observe {shlex.quote(one)}" for one in observed)
        raise BadCase("observe", ", ".join(commands), right + (words or "none"))
    run(
        argparse.Namespace(
            out=out,
            paths=paths,
            observe=observed,
            suite=earlier.suite != "none",
            all=earlier.suite == "all",
            n=workers,
            k=" ".join(earlier.asked_for("selected")),
        )
    )


def _runs(arguments: argparse.Namespace, paths: Sequence[Given], record: Path) -> Iterator[int]:
    """Run the suite, the user's tests, and all that is given to pytest. Yields the exit codes."""
    from ddp_equivalence.commands.given_checks import variable

    common = ["-n", arguments.n] if arguments.n != "0" else []
    common += ["-k", arguments.k] if arguments.k else []
    common += ["-o", f"cache_dir={cache_folder()}", f"--ddp-lines={record}"]
    pytest = [sys.executable, "-m", "pytest"]
    if arguments.suite:
        some = [] if arguments.all else ["--ddp-pairwise"]
        of_suite = [*OPTIONS_OF_SUITE, f"--ddp-lines-of={OF_SUITE}", *some, *common]
        yield exit_code_of([*pytest, *of_suite], suite_folder())
    if tests := [one.text for one in paths if one.is_test]:
        yield exit_code_of([*pytest, *tests, *common], Path.cwd())
    files = [one.text for one in paths if not one.is_test]
    if files or arguments.observe:
        with tempfile.TemporaryDirectory(prefix="ddp_equivalence-") as nothing:
            Path(nothing, "pytest.ini").write_text("[pytest]\n")  # no other one counts
            plugin = ["-p", "ddp_equivalence.commands.given_checks", "--no-header"]
            alone = [
                "--rootdir=.",
                f"--confcutdir={nothing}",
                f"--config-file={nothing}/pytest.ini",
            ]
            words = [*pytest, nothing, *alone, *plugin, *common]
            environment = {**os.environ, **variable(files, arguments.observe)}
            yield exit_code_of(words, Path.cwd(), environment)


def _write_begin(writer: RecordWriter, arguments: argparse.Namespace) -> None:
    from ddp_equivalence.gate.surroundings import defaults, source_digest, surroundings

    writer.write(
        "record",
        schema=SCHEMA,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        source=source_digest(suite_folder()),
        workers=arguments.n,
        asked=asked(arguments),
    )
    writer.write("environment", values=surroundings(Path.cwd()))
    writer.write("defaults", values=defaults())


# What a run is asked to check.


class Given(NamedTuple):
    """One PATH of the command line. ``is_test``: pytest collects it; else it is for ``check``."""

    text: str
    file: Path
    is_test: bool


def given(text: str) -> Given:
    """``tests/``, ``test_a.py``, ``test_a.py::test_b``, ``mine.py`` or ``mine.py:step``.

    Raises BadCase for what is none of these, or does not exist.
    """
    name, colons, _ = text.partition("::")
    step = ""
    if not colons and ".py:" in text:
        name, _, step = text.rpartition(":")
    path = Path(name)
    if not path.exists():
        raise BadCase("PATH", text, "a file or folder that exists")
    if path.is_file() and path.suffix != ".py":
        raise BadCase("PATH", text, "a folder, or a file of Python")
    is_test = path.name.startswith("test_") or path.stem.endswith("_test")
    if colons and not is_test:
        raise BadCase("PATH", text, f"{name}:STEP, as for `check`: only tests are named by ::")
    return Given(text, path, path.is_dir() or (is_test and not step))


def asked(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """The entry of a record's first line on what it is of, with a digest of the files, but not of
    what these import. Raises BadCase.

    ``suite``: "none", "pairwise", or "all" of its tests, of which ``selected`` may select some.
    """
    hashed = hashlib.sha256()
    for text in arguments.paths:
        file = given(text).file
        for one in sorted(file.rglob("*.py")) if file.is_dir() else [file]:
            hashed.update(f"{one.as_posix()}\n".encode() + one.read_bytes())
    part = "all" if arguments.all or arguments.k else "pairwise"
    return {
        "suite": part if arguments.suite else "none",
        "paths": list(arguments.paths),
        "observed": list(arguments.observe),
        "selected": arguments.k,
        "files": hashed.hexdigest()[:32],
    }
