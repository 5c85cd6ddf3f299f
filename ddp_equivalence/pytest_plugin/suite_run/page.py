"""``ddp-equivalence run --record``: the machine, the plan and the results as one Markdown page.

Pages are published, so a page holds no name of a host or of a user, no path, and no UUID of a GPU.
"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_equivalence.report.box import Box, box_lines, title

PATH = re.compile(r"(?<![\w.:/])~?/(?:[\w.+@~-]+/)*[\w.+@~-]+/?")
UUID = re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F-]{8,}")

SAID_OF_ALL = ("", "root", "localhost")
"""Such names tell nothing of a machine. "root cause" is a part of reports."""

LONGEST_LIST = 50
"""So many failed tests are listed."""


@dataclass(frozen=True)
class Ran:
    """What the page says of a run beside its machine.

    ``counts``: "passed", "failed", ... -> number of tests. ``failed``: the ids of those that did
    not pass. ``date``: the day on which it began, as in 2026-11-22.
    """

    date: str
    seconds: float
    workers: int
    exit_code: int
    counts: Mapping[str, int]
    plan: Sequence[str]
    table: Sequence[str]
    failed: Sequence[str]


def write(folder: Path, box: Box, ran: Ran) -> Path:
    """Write the page into the folder and return its path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(page_lines(box, ran)) + "\n"
    name = f"{ran.date}-{_name_of(box)}"
    number = 1
    while True:
        path = folder / (f"{name}.md" if number == 1 else f"{name}-{number}.md")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            return path
        except FileExistsError:  # another run of the same day
            number += 1


def page_lines(box: Box, ran: Ran) -> Iterator[str]:
    """The page, line by line."""
    machine = list(box_lines(box, with_uuids=False))
    yield f"# {ran.date}: {without_private(title(box))}"
    yield ""
    yield "This page was written by `ddp-equivalence run --record`. To compare it with another"
    yield "machine, run the same command there, and read the two pages side by side."
    yield ""
    counts = ", ".join(f"{count} {word}" for word, count in ran.counts.items())
    yield f"The run took {ran.seconds:.0f} s with {_workers(ran.workers)}: {counts}."
    yield f"Its exit code is {ran.exit_code}."
    blocks = {"The machine": machine, "The plan": ran.plan, "Results": ran.table}
    for heading, lines in blocks.items():
        yield ""
        yield f"## {heading}"
        yield ""
        yield "```"
        yield from map(without_private, lines)
        yield "```"
    if ran.failed:
        yield ""
        yield "## Tests that did not pass"
        yield ""
        yield "```"
        yield from map(without_private, ran.failed[:LONGEST_LIST])
        if len(ran.failed) > LONGEST_LIST:
            yield f"... and {len(ran.failed) - LONGEST_LIST} more"
        yield "```"


def without_private(text: str) -> str:
    """The text without paths, UUIDs of GPUs, and the names of this host and this user."""
    text = UUID.sub("(UUID)", PATH.sub("(path)", text))
    for name, instead in _private_names().items():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, text)
    return text


def _private_names() -> dict[str, str]:
    """Name of this host or user -> what stands for it."""
    names = {socket.gethostname(): "(host)"}
    with suppress(OSError, KeyError, ImportError):  # the user may have no name
        names[getpass.getuser()] = "(user)"
    return {name: instead for name, instead in names.items() if name not in SAID_OF_ALL}


def _workers(workers: int) -> str:
    return "one pytest worker" if workers == 1 else f"{workers} pytest workers"


def _name_of(box: Box) -> str:
    """The machine as a part of a file's name, such as ``4-x-nvidia-a100``, or ``cpu``."""
    if not box.has_gpus:
        return "cpu"
    gpus, _, _ = without_private(title(box)).rpartition(", ")
    return re.sub(r"[^a-z0-9]+", "-", gpus.lower()).strip("-")
