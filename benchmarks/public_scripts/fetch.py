"""Fetch the public training scripts of scripts.toml at their commits, and check every file.

    python benchmarks/public_scripts/fetch.py DIR [--git OWNER/NAME=GIT_DIR ...] [--only NAME ...]

Every script gets a folder DIR/NAME, with its files where they lie in their repository. They come
from GitHub, or by `git show` from the git directory of a clone that --git names. A file whose
SHA-256 is not the one in scripts.toml is refused, and nothing of that script is written. Nothing
is ever edited: what differs between a script as published and a script as run is its command line
alone. Next, prepare.py makes the small data that the scripts read.
"""

import argparse
import hashlib
import pathlib
import subprocess
import sys
import tomllib
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
RAW = "https://raw.githubusercontent.com/{repository}/{commit}/{path}"


class WrongFile(Exception):
    """A file is not there, or is not the one that scripts.toml names."""


def scripts(only=()):
    """The tables of scripts.toml in their order, or those whose names are given."""
    with open(HERE / "scripts.toml", "rb") as file:
        tables = tomllib.load(file)["script"]
    missing = set(only) - {table["name"] for table in tables}
    if missing:
        raise SystemExit(f"scripts.toml has no script {', '.join(sorted(missing))}")
    return [table for table in tables if not only or table["name"] in only]


def content(repository, commit, path, git_directory=None):
    """The bytes of one file at one commit, from a git directory if given, else from GitHub."""
    if git_directory:
        command = ["git", f"--git-dir={git_directory}", "show", f"{commit}:{path}"]
        shown = subprocess.run(command, capture_output=True, check=False)
        if shown.returncode:
            reason = shown.stderr.decode(errors="replace").strip()
            raise WrongFile(f"{path}: git shows no such file at {commit} ({reason})")
        return shown.stdout
    address = RAW.format(repository=repository, commit=commit, path=path)
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            return answer.read()
    except OSError as error:
        raise WrongFile(f"{path}: {address} cannot be read ({error})") from error


def checked(data, path, expected):
    """The bytes themselves, if their SHA-256 is the expected one."""
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise WrongFile(f"{path}: expected SHA-256 {expected}, found {found}")
    return data


def lay(table, directory, git_directory=None):
    """Write the files of one script under directory/NAME, all of them or none."""
    files = {
        entry["path"]: checked(
            content(table["repository"], table["commit"], entry["path"], git_directory),
            entry["path"],
            entry["sha256"],
        )
        for entry in table["files"]
    }
    for path, data in files.items():
        target = directory / table["name"] / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    (directory / table["name"] / table["cwd"]).mkdir(parents=True, exist_ok=True)
    return len(files)


def main():
    """Fetch the scripts, and say what was refused."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--git", action="append", default=[], metavar="OWNER/NAME=GIT_DIR")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    arguments = parser.parse_args()
    clones = dict(pair.split("=", 1) for pair in arguments.git)
    refused = 0
    for table in scripts(arguments.only):
        try:
            number = lay(table, arguments.directory, clones.get(table["repository"]))
            print(
                f"{table['name']}: {number} files of {table['repository']}@{table['commit'][:12]}"
            )
        except WrongFile as error:
            refused += 1
            print(f"{table['name']}: refused: {error}", file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
