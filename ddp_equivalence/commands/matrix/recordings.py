"""The records under several versions, each made in an environment of its own."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import DIFFERENT, SAME
from ddp_equivalence.commands.interruption import SECONDS_TO_END, exit_code_of
from ddp_equivalence.commands.record.asked import asked, part_of_suite
from ddp_equivalence.commands.suite_folder import suite_folder

if TYPE_CHECKING:
    from ddp_equivalence.commands.matrix.versions import Wanted


class Recordings:
    """``arguments``: of the command line. ``failed``: name -> why there is no record."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._out: Path = arguments.out
        self.failed: dict[str, str] = {}
        self._asked = asked(
            arguments.paths,
            arguments.observe,
            arguments.k,
            part_of_suite(is_run=arguments.suite, whole=arguments.all or bool(arguments.k)),
        )

    def is_recorded(self, one: Wanted) -> bool:
        """It is recorded, whole, and of what is asked for now."""
        from ddp_equivalence.gate.recorded import read_record

        try:
            found = read_record(self.folder(one))
            made_as = json.loads(self._made_as(one).read_text())
        except (BadCase, OSError, ValueError):
            return False
        whole = found.end is not None and found.facts.get("asked") == self._asked
        return whole and made_as == self._how(one)

    def _made_as(self, one: Wanted) -> Path:
        return self._out / f"{one.name}.made_as.json"

    def _how(self, one: Wanted) -> dict[str, Any]:
        """All that decides what an environment holds, beside its name."""
        from ddp_equivalence.gate.surroundings import packages, source_digest

        file, on_top = self._arguments.requirements, self._arguments.on_top
        sees_present = on_top or not one.requirements
        return {
            "on_top": on_top,
            "requirements": "" if file is None else file.read_text(),
            "source": source_digest(suite_folder()),
            "present": packages() if sees_present else {},
        }

    def folder(self, one: Wanted) -> Path:
        """Where its record is, or will be."""
        return self._out / one.name

    def record(self, one: Wanted, place: str) -> None:
        """Make the environment and the record, unless it is recorded. ``place``: for the reader."""
        from ddp_equivalence.commands.matrix.environment import (
            CannotInstall,
            Environment,
            folder_for_environments,
        )

        if self.is_recorded(one):
            print(f"{one.name} ({place}): recorded before, in {self.folder(one)}", flush=True)
            return
        if not one.requirements:
            self._run(one, sys.executable)
            return
        print(f"{one.name} ({place}): installing", flush=True)
        started = time.monotonic()
        keep: Path | None = self._arguments.keep_environments
        base = folder_for_environments(keep)
        environment = Environment(base / one.name, self._arguments.on_top)
        try:
            environment.delete()
            environment.make(one.requirements, self._arguments.requirements)
            installed = time.monotonic() - started
            print(f"{one.name} ({place}): installed in {installed:.0f} s, recording", flush=True)
            self._run(one, str(environment.python))
        except CannotInstall as error:
            self.failed[one.name] = str(error)
            print(f"{one.name} ({place}): could not be installed", flush=True)
        finally:
            if keep is None:
                shutil.rmtree(base, ignore_errors=True)

    def _run(self, one: Wanted, python: str) -> None:
        given = self._arguments
        folder, log = self.folder(one), self._out / f"{one.name}.txt"
        self._clear(folder)
        self._out.mkdir(parents=True, exist_ok=True)
        words = [
            *(python, "-m", "ddp_equivalence", "record", str(folder)),
            *(["-n", given.n] if given.n != "0" else []),
            *(["-k", given.k] if given.k else []),
            *([] if given.suite else ["--no-suite"]),
            *(["--all"] if given.all else []),
            *(word for command in given.observe for word in ("--observe", command)),
            *given.paths,
        ]
        started = time.monotonic()
        with log.open("wb") as output:
            code = exit_code_of(words, output=output, seconds_to_end=2 * SECONDS_TO_END)
        seconds = time.monotonic() - started
        says = {SAME: "everything passed", DIFFERENT: "something failed"}
        print(f"{one.name}: {says.get(code, 'cut off')} in {seconds:.0f} s ({log})", flush=True)
        self._made_as(one).write_text(json.dumps(self._how(one)))
        if not self.is_recorded(one):
            printed = log.read_text(errors="replace").strip().splitlines()
            self.failed[one.name] = "\n".join(printed[-6:])
        elif wrong := self._other_versions(one):
            self.failed[one.name] = wrong
            self._made_as(one).unlink()

    def _clear(self, folder: Path) -> None:
        """Delete what an interrupted run has left, and nothing else."""
        from ddp_equivalence.gate.record_lines import NAME

        if not folder.exists():
            return
        inside = [path.name for path in folder.iterdir()] if folder.is_dir() else ["a file"]
        if set(inside) - {NAME}:
            right = f"a folder with no {folder.name} in it, or one that holds a record alone"
            raise BadCase("out", str(self._out), right)
        shutil.rmtree(folder)

    def _other_versions(self, one: Wanted) -> str:
        """What ran although another version was asked for; "" if nothing did."""
        from ddp_equivalence.gate.recorded import read_record

        environment = read_record(self.folder(one)).environment
        found = environment["packages"]
        hidden = [name for name, _ in one.versions if name in environment["hidden"]]
        wrong = [
            f"{name} of this folder is imported, and not the package: call `matrix` elsewhere"
            for name in hidden
        ]
        wrong += [
            f"{name} {version} was asked for, and {found.get(name, 'none')} ran: is another one "
            "found first, such as by PYTHONPATH?"
            for name, version in one.versions
            if str(found.get(name)).partition("+")[0] != version.partition("+")[0]
        ]
        return "\n".join(wrong)
