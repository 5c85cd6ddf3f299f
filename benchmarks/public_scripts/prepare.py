"""Make the small data, tokenizers and configurations that the public training scripts read.

    python benchmarks/public_scripts/prepare.py DIR [--only NAME ...]

DIR is the folder that fetch.py filled. Everything is made from fixed seeds, a few megabytes in
all, and lies where a script looks for it: most scripts name a model or a data set of the Hugging
Face hub, which is found in the working folder if a folder of that name is there. Nothing is
downloaded. What a preparation needs beside Python is among the script's packages. Texts are made
in prepare_text.py, pictures in prepare_images.py.
"""

import argparse
import pathlib

import prepare_images
import prepare_text
from fetch import scripts


def preparation(name):
    """The function of this name: it is given the folder that the script runs in."""
    for module in (prepare_text, prepare_images):
        if hasattr(module, name):
            return getattr(module, name)
    raise SystemExit(f"there is no preparation {name}")


def main():
    """Prepare the scripts, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    arguments = parser.parse_args()
    for table in scripts(arguments.only):
        if table.get("prepare"):
            folder = (arguments.directory / table["name"] / table["cwd"]).resolve()
            preparation(table["prepare"])(folder)
            print(f"{table['name']}: {table['prepare']}")


if __name__ == "__main__":
    main()
