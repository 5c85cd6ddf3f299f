"""A copy of the user's folder for a script to run in: folders are made anew, files are links.

What the script writes below its working folder, such as checkpoints, stays in the copy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

MOST_ENTRIES = 20_000
"""Folders below so many files are links themselves, and are written to if the script does that."""

LINKED = frozenset((".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", ".tox"))
"""Folders that are always links."""


def copy_of_links(folder: Path, to: Path) -> None:
    """Make the copy. ``to`` must not exist."""
    to.mkdir(parents=True)
    left = MOST_ENTRIES
    waiting = [(folder.resolve(), to)]
    while waiting:
        source, copy = waiting.pop(0)  # folders near the top are copied first
        try:
            entries = sorted(os.scandir(source), key=lambda entry: entry.name)
        except OSError:
            continue
        left -= len(entries)
        for entry in entries:
            at = copy / entry.name
            if Path(entry.path) in (to, *to.parents):
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder and entry.name not in LINKED and left > 0:
                at.mkdir()
                waiting.append((Path(entry.path), at))
            else:
                at.symlink_to(os.path.realpath(entry.path))


def with_own_scripts(command: Sequence[str], folder: Path) -> tuple[str, ...]:
    """The command with the paths of Python files made absolute.

    They then run under their own names, and find the modules beside them.
    """
    return tuple(
        str((folder / word).resolve())
        if word.endswith(".py") and not os.path.isabs(word) and (folder / word).is_file()
        else word
        for word in command
    )
