"""Annotations of GitHub Actions: a line of a log that GitHub shows at a line of a file.

Source: docs.github.com, "Workflow commands for GitHub Actions", and how GitHub's own toolkit
escapes them.
"""

from __future__ import annotations

import os


def annotation(file: str, line: int, title: str, message: str) -> str:
    """``::error file=...,line=...,title=...::message``, on one line."""
    place = [f"file={_property(_from_root(file))}", f"line={line}"] if file else []
    properties = ",".join([*place, f"title={_property(title)}"])
    return f"::error {properties}::{_data(message.strip())}"


def _from_root(file: str) -> str:
    """The path from the root of the repository, which is what GitHub looks for."""
    path = os.path.realpath(file)
    for root in (os.environ.get("GITHUB_WORKSPACE"), os.getcwd()):
        if root and path.startswith(os.path.join(os.path.realpath(root), "")):
            return os.path.relpath(path, os.path.realpath(root)).replace(os.sep, "/")
    return path.replace(os.sep, "/")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
