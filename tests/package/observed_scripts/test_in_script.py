"""Parts of what runs in the processes of a script."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_packed_sequence
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from ddp_equivalence.observed_scripts.in_script.closer_look import LoggedOperations
from ddp_equivalence.observed_scripts.in_script.script_changes import (
    BYTES_PER_ELEMENT,
    DROPOUTS,
    drop_nothing,
    let_sequences_be_unsorted,
    require_memory,
)

# --- functions of torch that are replaced


@pytest.fixture
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests replace in torch is put back."""
    attention = nn.functional.scaled_dot_product_attention.__name__
    for name in (*DROPOUTS, attention):
        monkeypatch.setattr(nn.functional, name, getattr(nn.functional, name))
    for owner, name in (
        (torch, "dropout"),
        (nn.RNNBase, "__init__"),
        (nn.Module, "register_parameter"),
        (nn.utils.rnn, "pack_padded_sequence"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))


@pytest.mark.usefixtures("unchanged")
def test_without_dropout_attention_and_recurrent_layers_drop_nothing_either() -> None:
    query = torch.randn(2, 3, 4)
    expected = nn.functional.scaled_dot_product_attention(query, query, query)
    drop_nothing()
    attention = nn.functional.scaled_dot_product_attention
    assert torch.equal(attention(query, query, query, None, 0.9, False), expected)
    assert torch.equal(attention(query, query, query, dropout_p=0.9), expected)
    assert torch.equal(nn.Dropout(0.9)(query), query)
    recurrent = nn.LSTM(4, 5, num_layers=2, dropout=0.9)
    assert torch.equal(recurrent(query)[0], recurrent(query)[0])


@pytest.mark.usefixtures("unchanged")
def test_sequences_that_are_not_sorted_can_be_packed() -> None:
    let_sequences_be_unsorted()
    rows, lengths = torch.randn(3, 5, 2), torch.tensor([2, 5, 3])
    packed = nn.utils.rnn.pack_padded_sequence(rows, lengths, True)
    again, found = pad_packed_sequence(packed, batch_first=True)
    assert found.tolist() == lengths.tolist()
    assert torch.equal(again[1], rows[1])


@pytest.mark.usefixtures("unchanged")
def test_parameters_that_do_not_fit_into_the_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine has room for 100 parameters on each of two ranks."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    available = SimpleNamespace(available=2 * 100 * BYTES_PER_ELEMENT)
    monkeypatch.setattr("psutil.virtual_memory", lambda: available)
    require_memory()
    nn.Linear(1000, 1000, device="meta")  # needs no room
    nn.Linear(10, 10, bias=False)
    with pytest.raises(MemoryError, match="101 parameters do not fit into the memory in float64"):
        nn.Linear(1, 1, bias=False)


# --- the log of operations beside modes that the script has begun itself


def test_a_mode_of_the_script_and_the_log_do_not_disturb_each_other() -> None:
    with FlopCounterMode(display=False):
        assert LoggedOperations.begun() is None
    log = LoggedOperations.begun()
    assert log is not None
    with FlopCounterMode(display=False) as counter:
        torch.ones(2, 2) @ torch.ones(2, 2)
        assert not log.stop()
    assert counter.get_total_flops() == 16
    assert log.stop()
    assert _get_current_dispatch_mode() is None


# --- forks of a process that has reduced once

PROGRAM = textwrap.dedent(
    """
    import os, signal, sys, torch, torch.distributed as dist
    from ddp_equivalence.observed_scripts.in_script import replayer

    backend = {"backend": sys.argv[2]} if len(sys.argv) > 2 else {}
    store = "file://" + sys.argv[1]
    dist.init_process_group(init_method=store, rank=0, world_size=1, **backend)
    dist.all_reduce(torch.ones(1))
    child = os.fork()
    if not child:
        signal.alarm(30)
        replayer._renew_groups()
        dist.all_reduce(torch.ones(1))
        print("reduced", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    """
)


@pytest.mark.parametrize("backend", ["", "gloo", "cpu:gloo"])
def test_a_fork_reduces_whatever_backend_the_script_names(backend: str, tmp_path: Path) -> None:
    """A script that names none has one for each kind of device."""
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), *backend.split()]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "reduced\n", done.stderr
