"""A plugin of pytest that runs files for ``check`` and commands for ``observe`` as tests.

The environment names them, so that the workers of xdist find the same ones.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "DDP_EQUIVALENCE_GIVEN_CHECKS"


def variable(files: list[str], commands: list[str]) -> dict[str, str]:
    """The variable that pytest must get. ``files``: FILE.py or FILE.py:NAME."""
    return {VARIABLE: json.dumps({"files": files, "commands": commands})}


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Add them to what pytest has collected."""
    given = json.loads(os.environ.get(VARIABLE, "{}"))
    for text in given.get("files", ()):
        items.append(_FileItem.from_parent(session, name=text, nodeid=f"check {text}"))
    for text in given.get("commands", ()):
        items.append(_ScriptItem.from_parent(session, name=text, nodeid=f"observe {text}"))


class _GivenItem(pytest.Item):
    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return what pytest shows: a name without a folder before it."""
        return self.config.rootpath, None, self.nodeid

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """The report of the verdict alone: where this file called is of no interest."""
        return str(excinfo.value)


class _FileItem(_GivenItem):
    def runtest(self) -> None:
        from ddp_equivalence import assert_equivalent
        from ddp_equivalence.case import settings
        from ddp_equivalence.commands.check import target
        from ddp_equivalence.commands.user_file import load

        found = load(*target(self.name))
        repeat = {"repeat": f"ddp-equivalence check {self.name}", "full_report_with": "--full"}
        with settings.using(settings.replaced(**repeat)):
            assert_equivalent(found.case, found.step, **found.options)


class _ScriptItem(_GivenItem):
    def runtest(self) -> None:
        from ddp_equivalence import observe
        from ddp_equivalence.case import settings

        with settings.using(settings.replaced(full_report_with="--full before the --")):
            observe(self.name).assert_equivalent()
