"""What a step may do while an edit of it is tried: nothing that outlives its process."""

from __future__ import annotations

import importlib
import io
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import current_process
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ddp_equivalence.measurement.edited_code import WouldActOutside, kept_inside

Act = Callable[[Path], object]

FORBIDDEN: dict[str, Act] = {
    "write a file": lambda path: path.write_text("new"),
    "append to a file": lambda path: path.open("a"),
    "os.open": lambda path: os.open(path, os.O_WRONLY | os.O_CREAT),
    "torch.save": lambda path: torch.save({"x": torch.ones(2)}, path),
    "a temporary file": lambda path: tempfile.NamedTemporaryFile(dir=path.parent),  # noqa: SIM115
    "os.remove": os.remove,
    "rename": lambda path: path.rename(path.with_name("other")),
    "a folder": lambda path: path.with_name("folder").mkdir(),
    "a link": lambda path: path.with_name("link").symlink_to(path),
    "a process": lambda path: subprocess.run([sys.executable, "-c", ""], check=False),
    "a signal to another process": lambda path: os.kill(os.getppid(), 0),
    "a connection elsewhere": lambda path: reach_elsewhere(socket.SOCK_STREAM),
    "a packet sent elsewhere": lambda path: reach_elsewhere(socket.SOCK_DGRAM),
}

ELSEWHERE = ("192.0.2.1", 9)  # an address that belongs to nobody


def reach_elsewhere(kind: int) -> None:
    with socket.socket(socket.AF_INET, kind) as one:
        one.connect(ELSEWHERE) if kind == socket.SOCK_STREAM else one.sendto(b"x", ELSEWHERE)


def to_itself(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()


def unix_sockets(path: Path) -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(b"x")
        assert other.recv(1) == b"x"


def pipe(path: Path) -> None:
    receive, send = os.pipe()
    os.write(send, b"x")
    assert os.read(receive, 1) == b"x"


def workers_of_a_loader(path: Path) -> None:
    current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined] # as on a rank
    data = TensorDataset(torch.arange(6.0))
    loader = DataLoader(
        data, batch_size=2, num_workers=1, timeout=10, multiprocessing_context="fork"
    )
    assert sum(float(batch.sum()) for (batch,) in loader) == 15.0


ALLOWED: dict[str, Act] = {
    "read a file": lambda path: path.read_text(),
    "/dev/null": lambda path: Path(os.devnull).write_text("x"),
    "print": lambda path: print("x", file=sys.stderr),
    "a connection to this machine": to_itself,
    "sockets without a network": unix_sockets,
    "a pipe": pipe,
    "a queue": lambda path: multiprocessing.get_context("fork").SimpleQueue().put(1),
    "the workers of a DataLoader": workers_of_a_loader,
    "torch.save into memory": lambda path: torch.save(torch.ones(2), io.BytesIO()),
    "a signal to itself": lambda path: os.kill(os.getpid(), 0),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file.txt"
    path.write_text("old")
    return path


def listed(path: Path) -> dict[str, str]:
    return {one.name: one.read_text() for one in path.parent.iterdir()}


@pytest.mark.parametrize("act", FORBIDDEN.values(), ids=FORBIDDEN)
def test_what_acts_outside_is_prevented_and_told_of(act: Act, file: Path) -> None:
    with kept_inside() as prevented, pytest.raises(WouldActOutside):
        act(file)
    assert len(prevented) == 1
    assert listed(file) == {"file.txt": "old"}


@pytest.mark.parametrize("act", ALLOWED.values(), ids=ALLOWED)
def test_what_stays_inside_is_allowed(act: Act, file: Path) -> None:
    with kept_inside() as prevented:
        act(file)
    assert prevented == []


def test_a_module_may_be_imported_for_the_first_time(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would write the compiled module to a folder beside it."""
    file.with_name("imported_inside.py").write_text("VALUE = 3")
    monkeypatch.syspath_prepend(file.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    with kept_inside() as prevented:
        assert importlib.import_module("imported_inside").VALUE == 3
    monkeypatch.delitem(sys.modules, "imported_inside")
    assert prevented == []
    assert not file.with_name("__pycache__").exists()


def test_nothing_is_prevented_behind_the_block(file: Path) -> None:
    with pytest.raises(KeyError), kept_inside():
        raise KeyError
    file.write_text("new")
    torch.save({"x": 1}, file.with_name("saved.pt"))
    assert file.read_text() == "new"
    assert file.with_name("saved.pt").stat().st_size > 0


def test_the_first_name_of_a_temporary_folder_is_allowed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)  # as in a new process
    with kept_inside() as prevented:
        tempfile.gettempdir()
    assert prevented == []


@pytest.mark.parametrize(("other_threads", "content"), [(False, "new"), (True, "old")])
def test_threads_that_run_already_may_be_left_alone(
    other_threads: bool, content: str, file: Path
) -> None:
    go, done = threading.Event(), threading.Event()

    def write() -> None:
        go.wait()
        with suppress(WouldActOutside):
            file.write_text("new")
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    with kept_inside(other_threads=other_threads):
        go.set()
        assert done.wait(10)
    thread.join()
    assert file.read_text() == content
