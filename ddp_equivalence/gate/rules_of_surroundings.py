"""What has changed around the tests: defaults, packages, variables and the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ddp_equivalence.gate.finding import Seen
from ddp_equivalence.gate.recorded import Recorded
from ddp_equivalence.gate.surroundings import MACHINE

OF_MACHINE = (*MACHINE, "cores", "driver")
OF_TORCH = ("torch", "python", "cuda", "nccl", "cudnn", "ddp_equivalence")
LONGEST = 60
SAY_NOTHING = ("<object object>", "<factory>")
"""Defaults that only mean that nothing was given."""


def changed_surroundings(old: Recorded, new: Recorded) -> Iterator[Seen]:
    """Compare defaults, packages, variables and machines."""
    yield from _changed_defaults(old, new)
    for name in OF_TORCH:
        yield from _differs("package_changed", name, old.environment, new.environment)
    before, after = _table(old, "packages"), _table(new, "packages")
    for name in sorted({*before, *after} - {"torch", "ddp-equivalence"}):
        yield from _differs("package_changed", name, before, after)
    before, after = _table(old, "variables"), _table(new, "variables")
    for name in sorted({*before, *after}):
        yield from _differs("variable_changed", name, before, after)
    for name in OF_MACHINE:
        yield from _differs("machine_changed", name, old.environment, new.environment)


def other_checks(old: Recorded, new: Recorded) -> Iterator[Seen]:
    """What the records say of themselves: which checks they are of."""
    asked = old.facts.get("asked"), new.facts.get("asked")
    before, after = (one if isinstance(one, dict) else {} for one in asked)
    for name, what in (
        ("files", "the files of your checks"),
        ("selected", "the words of -k"),
        ("paths", "the paths"),
        ("observed", "the observed commands"),
        ("suite", "how much of the suite runs"),
    ):
        if before.get(name) != after.get(name):
            text = _differing(before.get(name), after.get(name)) if name != "files" else "changed"
            yield Seen("other_checks", what, text)
    is_of_suite = "none" not in (before.get("suite"), after.get("suite"))
    if is_of_suite and old.facts.get("source") != new.facts.get("source"):
        yield Seen("other_checks", "the source of ddp_equivalence or its suite", "changed")


def _differing(before: Any, after: Any) -> str:
    return f"{_text(before)} -> {_text(after)}"


def _changed_defaults(old: Recorded, new: Recorded) -> Iterator[Seen]:
    for name in sorted({*old.defaults, *new.defaults}):
        before, after = old.defaults.get(name), new.defaults.get(name)
        if before == after:
            continue
        if before is None or after is None:
            others = new.defaults if after is None else old.defaults
            if any(one.startswith(f"{name[:-1]}.") for one in others):
                text = f"{before or 'an object'} -> {after or 'an object'}"
                yield Seen("default_changed", name, text)
                continue
            if f"{name.partition('(')[0]}({_parameter(name)})" in others:
                continue  # a field of an object; the object itself says it
            function = name.partition("(")[0]
            both = (old.defaults, new.defaults)
            if not all(any(one.startswith(f"{function}(") for one in known) for known in both):
                continue  # the whole function is new, or its package is
            text = f"is {after}, and is new" if before is None else f"was {before}, and is gone"
            yield Seen("default_new", name, text)
        elif before in SAY_NOTHING or after in SAY_NOTHING:
            yield Seen("default_new", name, f"{before} -> {after}, which is replaced inside")
        else:
            yield Seen("default_changed", name, f"{before} -> {after}")


def _parameter(name: str) -> str:
    """``policy`` of ``function(policy.field)``."""
    return name.partition("(")[2].rstrip(")").partition(".")[0]


def _table(record: Recorded, name: str) -> Mapping[str, Any]:
    found = record.environment.get(name)
    return found if isinstance(found, dict) else {}


def _differs(
    kind: str, name: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[Seen]:
    if before.get(name) != after.get(name):
        yield Seen(kind, name, _differing(before.get(name), after.get(name)))


def _text(value: Any) -> str:
    text = "none" if value is None or value == [] else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
