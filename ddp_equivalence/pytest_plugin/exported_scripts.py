"""``pytest --ddp-export-repro DIR``: a script for every check that differs in a failing test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from ddp_equivalence.report import listeners

if TYPE_CHECKING:
    from ddp_equivalence.measurement.request import Request
    from ddp_equivalence.report.verdict import Verdict

_requests = pytest.StashKey[list[tuple["Request", str]]]()
"""The requests whose scripts are written if the test fails, with the first line of the report."""


@contextmanager
def requests_kept(item: pytest.Item) -> Iterator[None]:
    """Keep the request of every check that differs, or whose ranks fail, inside the block."""
    item.stash[_requests] = []
    if item.config.getoption("--ddp-export-repro") is None:
        yield
        return

    def keep(verdict: Verdict, request: Request | None) -> None:
        if request is None:  # a script has an export of its own
            return
        if verdict.outcome == "different" or verdict.failure is not None:
            from ddp_equivalence.report.short.headline import headline_text

            item.stash[_requests].append((request, headline_text(verdict)))

    with listeners.listening(keep):
        yield


def export(item: pytest.Item) -> Iterator[str]:
    """Write the scripts of a failed test. Yields each script's path, or why it was not written."""
    requests, item.stash[_requests] = item.stash[_requests], []
    if not requests:
        return
    # A test may have changed the working folder.
    given = item.config.getoption("--ddp-export-repro")
    folder = item.config.invocation_params.dir / given
    for number, (request, headline) in enumerate(requests, start=1):
        from ddp_equivalence.report.script import command_of, export_request, file_name

        name = item.nodeid if len(requests) == 1 else f"{item.nodeid}-{number}"
        try:
            path = export_request(request, folder, headline=headline, name=file_name(name))
        except (ValueError, OSError) as error:
            yield f"no script: {error}"
        else:
            shown = given / path.name
            yield f"{shown} ({command_of(shown)})"
