"""Which versions are asked for, and which of a package there are."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.gate.surroundings import standard_name

NAME = r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)"
REQUIREMENT = re.compile(rf"^{NAME}(\[[A-Za-z0-9,._-]+\])?==[A-Za-z0-9][\w.!+-]*$")
RANGE = re.compile(rf"^{NAME}==(?P<first>[\w.!-]+)\.\.(?P<last>[\w.!-]+)$")
RIGHT = "NAME==VERSION; a comma stands between alternatives, and & between what belongs together"
PRESENT = "present"
"""The environment that this process runs in."""

RIGHT_RANGE = "NAME==FIRST..LAST, such as transformers==4.45.2..4.47.1"


@dataclass(frozen=True)
class Wanted:
    """One environment. ``requirements``: such as ("torch==2.13.0", "transformers==4.46.1"); none
    for the environment that this process runs in.
    """

    requirements: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of its folder, and of its record in reports."""
        return "+".join(self.requirements) or PRESENT

    @property
    def packages(self) -> tuple[str, ...]:
        """The names of its packages, as the packaging standard writes them, in their order."""
        return tuple(sorted(name for name, _ in self.versions))

    @property
    def versions(self) -> tuple[tuple[str, str], ...]:
        """The names, and the versions that are asked for."""
        pairs = (one.partition("==") for one in self.requirements)
        return tuple((standard_name(name), version) for name, _, version in pairs)

    def is_neighbour_of(self, other: Wanted) -> bool:
        """They have other versions of the same packages; all are neighbours of the present one."""
        is_present = not (self.requirements and other.requirements)
        return is_present or self.packages == other.packages


def wanted(texts: Sequence[str]) -> list[Wanted]:
    """What ``--with`` asks for. Raises BadCase."""
    found: list[Wanted] = []
    for text in texts:
        for alternative in text.split(","):
            if alternative == PRESENT:
                found.append(Wanted(()))
                continue
            requirements = tuple(one.strip() for one in alternative.split("&"))
            for one in requirements:
                if not REQUIREMENT.match(one):
                    raise BadCase("with", text, RIGHT)
            found.append(Wanted(requirements))
    twice = next((one for one in found if found.count(one) > 1), None)
    if twice is not None:
        raise BadCase("with", twice.name, "each environment once")
    if len(found) == 1:
        raise BadCase("with", found[0].name, f"two or more; {PRESENT} is the environment of now")
    return found


def between(text: str) -> list[Wanted]:
    """The releases from the first to the last that ``--bisect`` names. Raises BadCase."""
    match = RANGE.match(text)
    if match is None:
        raise BadCase("bisect", text, RIGHT_RANGE)
    name, first, last = match["name"], match["first"], match["last"]
    released = _released(name)
    for version in (first, last):
        if version not in released:
            known = ", ".join(released[-8:]) or "none"
            right = f"versions that the index has; {version} is none of them (the last are {known})"
            raise BadCase("bisect", text, right)
    begin, end = released.index(first), released.index(last)
    if begin >= end:
        right = f"a first version that is older than the last one; {RIGHT_RANGE}"
        raise BadCase("bisect", text, right)
    return [Wanted((f"{name}=={version}",)) for version in released[begin : end + 1]]


def _released(name: str) -> list[str]:
    """The versions that pip can find, the oldest first."""
    run = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", name], capture_output=True, text=True
    )
    for line in run.stdout.splitlines():
        if line.startswith("Available versions:"):
            return [one.strip() for one in line.partition(":")[2].split(",")][::-1]
    if "No module named pip" in run.stderr:
        right = "a Python with pip, which knows the releases of the index; this one has none"
        raise BadCase("bisect", sys.executable, right)
    last = (run.stderr.strip().splitlines() or ["pip printed nothing"])[-1]
    raise BadCase("bisect", name, f"a package that the index has; pip says: {last}")
