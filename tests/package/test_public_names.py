"""The public names work however they are imported, and importing them needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ddp_equivalence

IMPORTS = (
    "from ddp_equivalence.explain import KnownGood, Setup, explain, setup_like",
    "import ddp_equivalence; ddp_equivalence.explain.explain",
    "from ddp_equivalence import explain; explain.Setup",
    "from ddp_equivalence.reproduction import export",
    "import ddp_equivalence; ddp_equivalence.reproduction.export",
    "import ddp_equivalence.checking.check\nfrom ddp_equivalence import check\ncheck.__code__",
)


@pytest.mark.parametrize("statements", IMPORTS)
def test_a_documented_import_works_in_a_new_process(statements: str) -> None:
    run = subprocess.run([sys.executable, "-c", statements], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("name", ddp_equivalence.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(ddp_equivalence, name).__name__ == name


@pytest.mark.parametrize("module", ["ddp_equivalence", "ddp_equivalence.pytest_plugin"])
def test_the_package_and_its_plugin_are_imported_without_torch(module: str) -> None:
    statements = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", statements]).returncode == 0


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(ddp_equivalence, "nothing")  # noqa: B009
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(ddp_equivalence.explain, "nothing")  # noqa: B009


def test_a_module_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python turns an AttributeError into "cannot import name", and leaves the reason out."""

    def fails(name: str) -> None:
        raise AttributeError("torch has no such thing")

    monkeypatch.delattr(ddp_equivalence, "check", raising=False)
    monkeypatch.setattr(ddp_equivalence, "import_module", fails)
    with pytest.raises(ImportError, match=r"checking\.check cannot be imported: torch has no"):
        exec("from ddp_equivalence import check")
