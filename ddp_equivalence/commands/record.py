"""``ddp-equivalence record``: write down what the suite and one's own checks show here."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import resource
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import DIFFERENT, NOT_JUDGED, SAME
from ddp_equivalence.commands.output import exit_code_of, require_writable_folder
from ddp_equivalence.commands.suite_folder import cache_folder

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands
    from ddp_equivalence.gate.record import Recorded, RecordWriter

NOTHING_COLLECTED = 5
"""Pytest's exit code where there is no test."""


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "record",
        help="write down what the suite and your own checks show here, for `gate`",
        description="Run the suite and your own checks, and write a record of verdicts, errors, "
        "digests of gradients, times, defaults and versions. `ddp-equivalence gate OLD NEW` holds "
        "one record against another. Exit code 0: everything passed, 1: something failed, 2: bad "
        "input, 3: the run was cut off.",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write; must not exist")
    parser.add_argument("--no-suite", action="store_true", help="leave the suite out")
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


class _Run(NamedTuple):
    """One run of pytest. ``of``: stands before the names of its tests."""

    of: str
    arguments: Sequence[str]
    at: Path
    environment: Mapping[str, str]


def run(arguments: argparse.Namespace) -> int:
    """Write the record. Raises BadCase for input that cannot be right, before anything runs."""
    out: Path = arguments.out
    if out.exists():
        raise BadCase("OUT", str(out), "a folder that does not exist yet: a record is never mixed")
    require_writable_folder("OUT", out)
    every = [*arguments.paths, *arguments.observe]
    twice = next((text for text in every if every.count(text) > 1), None)
    if twice is not None:
        raise BadCase("PATH", twice, "each check once")
    if not arguments.n.isdecimal() and arguments.n not in ("auto", "logical"):
        raise BadCase("n", arguments.n, "a number of workers, or auto")
    runs = list(_runs(arguments))
    if not runs:
        raise BadCase("PATH", "", "checks of your own beside --no-suite, or the suite")
    from ddp_equivalence.gate.record import NAME, RecordWriter

    out.mkdir(parents=True)
    path = (out / NAME).resolve()
    started = time.monotonic()
    _write_begin(RecordWriter(path), arguments)
    codes = [_ran(one, path) for one in runs]
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    RecordWriter(path).write(
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
        raise BadCase("record", earlier.name, "a record that says what it is of")
    for path in paths:
        if not Path(path.partition(":")[0]).resolve().is_relative_to(Path.cwd()):
            right = "a record of files in this folder: call `record` yourself for others"
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
            no_suite=earlier.suite == "none",
            all=earlier.suite == "all",
            n=workers,
            k=" ".join(earlier.asked_for("selected")),
        )
    )


def _runs(arguments: argparse.Namespace) -> Iterator[_Run]:
    """A run of the suite, one of the user's tests, and one of all that is given to pytest."""
    from ddp_equivalence.commands.given_checks import variable
    from ddp_equivalence.commands.suite_folder import TESTS, suite_folder
    from ddp_equivalence.gate.record import OF_SUITE

    common = ["-n", arguments.n] if arguments.n != "0" else []
    common += ["-k", arguments.k] if arguments.k else []
    common += ["-o", f"cache_dir={cache_folder()}"]
    if not arguments.no_suite:
        some = [] if arguments.all else ["--ddp-pairwise"]
        of_suite = ["-o", f"testpaths={TESTS}", "-W", "default", *some, *common]
        yield _Run(OF_SUITE, of_suite, suite_folder(), {})
    paths = [given(text) for text in arguments.paths]
    tests = [one.text for one in paths if one.is_test]
    files = [one.text for one in paths if not one.is_test]
    if tests:
        yield _Run("", [*tests, *common], Path.cwd(), {})
    if files or arguments.observe:
        plugin = ["-p", "ddp_equivalence.commands.given_checks"]
        environment = variable(files, arguments.observe)
        yield _Run("", [*plugin, *common], Path.cwd(), environment)


def _write_begin(writer: RecordWriter, arguments: argparse.Namespace) -> None:
    from ddp_equivalence.commands.suite_folder import suite_folder
    from ddp_equivalence.gate.record import SCHEMA
    from ddp_equivalence.gate.surroundings import defaults, source_digest, surroundings

    writer.write(
        "record",
        schema=SCHEMA,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        source=source_digest(suite_folder()),
        workers=arguments.n,
        asked=asked(
            arguments.paths,
            arguments.observe,
            arguments.k,
            part_of_suite(is_run=not arguments.no_suite, whole=arguments.all or bool(arguments.k)),
        ),
    )
    writer.write("environment", values=surroundings(Path.cwd()))
    writer.write("defaults", values=defaults())


def _ran(one: _Run, path: Path) -> int:
    """Run pytest, and return its exit code."""
    with tempfile.TemporaryDirectory(prefix="ddp_equivalence-") as nothing:
        Path(nothing, "pytest.ini").write_text("[pytest]\n")  # no other one counts
        collects_nothing = [nothing, f"--rootdir={nothing}"] if one.environment else []
        command = [
            *(sys.executable, "-m", "pytest", *collects_nothing, *one.arguments),
            *(f"--ddp-lines={path}", f"--ddp-lines-of={one.of}"),
        ]
        return exit_code_of(command, one.at, {**os.environ, **one.environment})


# What a run is asked to check.

PartOfSuite = Literal["none", "pairwise", "all"]
"""How much of the suite runs. With ``-k`` it is "all", of those tests that its words select."""


def part_of_suite(*, is_run: bool, whole: bool) -> PartOfSuite:
    """The part that is run. ``whole``: as the option ``--all`` asks for."""
    if not is_run:
        return "none"
    return "all" if whole else "pairwise"


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
        raise BadCase("PATH", text, f"{name}:STEP for a step of a file for `check`")
    return Given(text, path, path.is_dir() or (is_test and not step))


def asked(
    paths: Sequence[str], commands: Sequence[str], words: str, suite: PartOfSuite
) -> Mapping[str, Any]:
    """The entry of a record's first line on what it is of, with a digest of the files, but not of
    what these import. Raises BadCase.
    """
    hashed = hashlib.sha256()
    for text in paths:
        file = given(text).file
        for one in sorted(file.rglob("*.py")) if file.is_dir() else [file]:
            hashed.update(f"{one.as_posix()}\n".encode() + one.read_bytes())
    return {
        "suite": suite,
        "paths": list(paths),
        "observed": list(commands),
        "selected": words,
        "files": hashed.hexdigest()[:32],
    }
