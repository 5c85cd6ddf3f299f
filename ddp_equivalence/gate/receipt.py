"""A small file that a run on GPUs leaves, and that a job without GPUs can verify.

A plain receipt shows mistakes: another version of the code, a run that is old, an edited file. With
a key, which both jobs have as a secret, it is a signature (HMAC with SHA-256, RFC 2104).
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.gate.record import Recorded
from ddp_equivalence.ranks.backend_names import LANES
from ddp_equivalence.report.text import write_file

SCHEMA = 1
LARGEST = 16 << 20
KEY_VARIABLE = "DDP_EQUIVALENCE_RECEIPT_KEY"
"""The environment variable with the key."""

VERSIONS = ("torch", "nccl", "cuda", "cudnn", "driver", "python", "gpus", "machine")
LANE_AT_THE_END = re.compile(rf"-({'|'.join(LANES)})\]$")


def receipt_of(record: Recorded, key: str) -> dict[str, Any]:
    """The receipt of a record. ``key``: "" for none. Raises BadCase if the run was cut off."""
    if record.end is None:
        raise BadCase("record", record.name, "a record of a run that came to its end")
    lanes: dict[str, Counter[str]] = {}
    for check in record.checks.values():
        if not check.planted:
            lanes.setdefault(check.lane, Counter())[check.outcome] += 1
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "made": record.facts.get("created"),
        "source": record.facts.get("source"),
        "suite": record.suite,
        "record": record.end.get("so_far"),
        "exit_codes": record.end.get("exit_codes"),
        "environment": {name: record.environment.get(name) for name in VERSIONS},
        "lanes": {lane: dict(counts) for lane, counts in lanes.items()},
        "tests": {name: test.outcome for name, test in record.tests.items()},
    }
    signature = _signature(content, key)
    return {**content, "digest": _digest(content), **({"signature": signature} if key else {})}


def write_receipt(record: Recorded, path: Path, key: str) -> None:
    """Write the receipt of a record."""
    write_file(path, json.dumps(receipt_of(record, key), indent=1) + "\n")


def read_receipt(path: Path) -> dict[str, Any]:
    """Read the file. Raises BadCase if it is no receipt."""
    right = "a receipt, as `ddp-equivalence receipt` writes it"
    if path.is_file() and path.stat().st_size > LARGEST:
        raise BadCase("receipt", str(path), f"{right}, of at most {LARGEST >> 20} MiB")
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise BadCase("receipt", str(path), f"{right}; {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadCase("receipt", str(path), f"{right}; it is no JSON") from error
    if not isinstance(found, dict) or not isinstance(found.get("schema"), int):
        raise BadCase("receipt", str(path), right)
    if found["schema"] > SCHEMA:
        raise BadCase("receipt", str(path), f"of version {SCHEMA}; this is {found['schema']}")
    return found


@dataclass(frozen=True)
class Wanted:
    """The demands on a receipt. ``source``: the digest of the suite that is merged. ``torch``: the
    version, without what is behind a "+". ``tests``: the names of all tests of that suite.
    ``must_run``: lanes on which something was compared. ``most_days``: how old it may be. ``key``:
    "" for none.
    """

    source: str
    torch: str
    tests: Collection[str]
    must_run: Collection[str]
    most_days: float
    key: str = ""


def refusals(receipt: Mapping[str, Any], wanted: Wanted, now: datetime.datetime) -> Iterator[str]:
    """Why the receipt does not show what is wanted; nothing if it does."""
    content = {name: one for name, one in receipt.items() if name not in ("digest", "signature")}
    if receipt.get("digest") != _digest(content):
        yield "it was altered after it was written"
        return
    if wanted.key:
        signature = str(receipt.get("signature", ""))
        if not hmac.compare_digest(signature, _signature(content, wanted.key)):
            yield f"it is not signed with the key in {KEY_VARIABLE}"
            return
    yield from _of_another_code(receipt, wanted)
    yield from _too_old(receipt, wanted, now)
    codes = receipt.get("exit_codes")
    if not isinstance(codes, list) or not codes or any(code != 0 for code in codes):
        yield f"the run did not pass: pytest ended with {receipt.get('exit_codes')}"
    tests = receipt.get("tests")
    outcomes: dict[str, str] = tests if isinstance(tests, dict) else {}
    failed = [name for name, outcome in outcomes.items() if outcome == "failed"]
    if failed:
        yield f"{len(failed)} tests failed, such as {failed[0]}"
    missing = Counter(map(_without_lane, wanted.tests)) - Counter(map(_without_lane, outcomes))
    if missing and receipt.get("suite") == "pairwise":
        yield "it is of a selection of the tests: `ddp-equivalence record --all` runs all"
    elif missing:
        yield f"{sum(missing.values())} tests are missing, such as {next(iter(missing))}"
    for lane in wanted.must_run:
        lanes = receipt.get("lanes")
        counts = lanes.get(lane) if isinstance(lanes, dict) else None
        if not isinstance(counts, dict) or not (counts.get("same") or counts.get("different")):
            yield f"nothing was compared on {lane}"


def _of_another_code(receipt: Mapping[str, Any], wanted: Wanted) -> Iterator[str]:
    if receipt.get("source") != wanted.source:
        yield "it is of another version of ddp_equivalence, or of its suite, than the one here"
    environment = receipt.get("environment")
    torch = environment.get("torch") if isinstance(environment, dict) else None
    if str(torch).partition("+")[0] != wanted.torch:
        yield f"it is of torch {torch}, and torch {wanted.torch} is wanted"


def _too_old(receipt: Mapping[str, Any], wanted: Wanted, now: datetime.datetime) -> Iterator[str]:
    try:
        made = datetime.datetime.fromisoformat(str(receipt.get("made")))
        days = (now - made).total_seconds() / 86_400
    except (ValueError, TypeError):
        yield "it does not say when it was made"
        return
    if days > wanted.most_days:
        yield f"it is {days:.0f} days old, and may be {wanted.most_days:g}"
    if days < -1:
        yield f"it was made on {made:%Y-%m-%d}, which has not come yet"


def _without_lane(test: str) -> str:
    """The name of a test without its lane: on a CPU, a case runs on another one than on a GPU."""
    return LANE_AT_THE_END.sub("]", test)


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()


def _signature(content: Mapping[str, Any], key: str) -> str:
    return hmac.new(key.encode(), _canonical(content), hashlib.sha256).hexdigest()
