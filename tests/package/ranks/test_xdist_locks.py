"""xdist workers share cores and GPUs by rank count: each is used once at a time, none is idle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks.lanes import Lane, first_device
from ddp_equivalence.ranks.warm_ranks import XdistLocks
from tests.package.pytest_plugin.test_pytest_plugin import THEIR_TEST
from tests.package.someone_elses_run import run

ON_CPU = Lane("gloo", "gloo", "cpu")
ON_GPU = Lane("nccl", "nccl", "cuda")
EIGHT = tuple(map(str, range(8)))

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs abstract socket names")


def new_locks(
    devices: tuple[str, ...] = EIGHT, run_id: str | None = None, cores: int = 8
) -> XdistLocks:
    return XdistLocks(run_id or uuid.uuid4().hex, cores, devices)


def test_gpus_of_cases_that_run_at_once_are_never_the_same() -> None:
    """As ``-n 8`` on a box with 8 GPUs: 2-rank cases are packed, and 8-rank ones still run."""
    run_id, lock = uuid.uuid4().hex, threading.Lock()
    held: list[str] = []
    most, granted = 0, []

    def worker(number: int) -> None:
        nonlocal most
        locks = new_locks(run_id=run_id)
        for turn in range(4):
            layout = parse("1x8" if (number + turn) % 4 == 0 else "1x2")
            with locks.hold(layout, ON_GPU) as devices:
                with lock:
                    assert not set(devices) & set(held)
                    held.extend(devices)
                    most = max(most, len(held))
                    granted.append(len(devices))
                time.sleep(0.01)
                with lock:
                    for device in devices:
                        held.remove(device)

    workers = [threading.Thread(target=worker, args=(number,)) for number in range(8)]
    for one in workers:
        one.start()
    for one in workers:
        one.join(60)
    assert sorted(granted) == [2] * 24 + [8] * 8
    assert most == 8


def test_warm_ranks_get_the_gpus_that_they_have() -> None:
    run_id = uuid.uuid4().hex
    with new_locks(run_id=run_id).hold(parse("1x2"), ON_GPU, [("4", "5")]) as devices:
        assert devices == ("4", "5")
        with new_locks(run_id=run_id).hold(parse("1x2"), ON_GPU, [("4", "5")]) as others:
            first = first_device(parse("1x2"), ON_GPU, 8)
            assert others == tuple(sorted((str(first), str((first + 1) % 8))))


def test_the_next_in_turn_is_not_overtaken() -> None:
    """An 8-rank case waits for one that runs; a 2-rank case that comes later waits for it."""
    run_id, order = uuid.uuid4().hex, []

    def case(layout: str) -> None:
        with new_locks(run_id=run_id).hold(parse(layout), ON_GPU):
            order.append(layout)
            time.sleep(0.05)

    with new_locks(run_id=run_id).hold(parse("1x2"), ON_GPU):
        large = threading.Thread(target=case, args=("1x8",))
        large.start()
        time.sleep(0.1)
        small = threading.Thread(target=case, args=("1x2",))
        small.start()
        time.sleep(0.1)
    large.join()
    small.join()
    assert order == ["1x8", "1x2"]


HOLDER = """
import sys, time
from tests.package.ranks.test_xdist_locks import ON_GPU, new_locks
from ddp_equivalence.case.layouts import parse
with new_locks(run_id=sys.argv[1]).hold(parse("1x8"), ON_GPU):
    print("held", flush=True)
    time.sleep(100)
"""


def test_a_forked_child_does_not_hold_on_to_what_its_parent_had() -> None:
    """As the workers of a DataLoader, which live longer than the case that forked them."""
    locks = new_locks(cores=1)
    with locks.hold(parse("1x1"), ON_CPU):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        got = threading.Event()
        threading.Thread(target=_takes, args=(locks, got), daemon=True).start()
        assert got.wait(10)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _takes(locks: XdistLocks, got: threading.Event) -> None:
    with locks.hold(parse("1x1"), ON_CPU):
        got.set()


def test_what_a_killed_worker_held_is_free() -> None:
    run_id = uuid.uuid4().hex
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", HOLDER, run_id]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()
    with new_locks(run_id=run_id).hold(parse("1x8"), ON_GPU) as devices:
        assert devices == EIGHT


COUNTS = """
import os, pathlib, time, pytest

def counted(model, rows, rank):
    at_work = pathlib.Path(os.environ["AT_WORK"])
    locks = at_work / f"{os.getpid()}"
    locks.touch()
    time.sleep(0.05)
    count = len(list(at_work.iterdir()))
    step(model, rows, rank)
    locks.unlink()
    print("at work:", count)

@pytest.mark.parametrize("number", range(4))
def test_counts(equivalence, number):
    verdict = equivalence.check(CASE, counted)
    assert verdict.outcome == "same"
    assert max(int(text.split()[-1]) for text in verdict.output.values()) <= 2
"""


def test_workers_take_turns_where_there_are_fewer_cores_than_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two cores two workers' 2-rank cases never run at once."""
    at_work = tmp_path / "at_work"
    at_work.mkdir()
    monkeypatch.setenv("AT_WORK", str(at_work))
    (tmp_path / "test_theirs.py").write_text(THEIR_TEST + COUNTS)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    two = ["taskset", "--cpu-list", cores]
    code, text = run(tmp_path, "-n", "2", "-k", "test_counts", before=two)
    assert code == 0, text
    assert "4 passed" in text
