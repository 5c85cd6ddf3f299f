"""What is written tensor by tensor is read by the safetensors library."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ddp_equivalence.observed_scripts.in_script import kept_tensors
from ddp_equivalence.observed_scripts.in_script.kept_tensors import LARGE, kept, whole
from ddp_equivalence.observed_scripts.recorded_step import DTYPES, write_tensors


def test_the_library_reads_every_dtype_and_shape(tmp_path: Path) -> None:
    tensors = {f"numbers/{dtype}": torch.arange(7).to(dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    write_tensors(tmp_path / "file.safetensors", tensors)
    found = load_file(tmp_path / "file.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        same = found[name].contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(same, tensor.contiguous().reshape(-1).view(torch.uint8)), name


def test_a_dtype_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"z has the dtype torch\.complex128"):
        write_tensors(tmp_path / "file", {"z": torch.zeros(2, dtype=torch.complex128)})


@pytest.fixture
def kept_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Large copies lie in files of this folder."""
    monkeypatch.setattr(kept_tensors, "MOST_IN_MEMORY", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_copy_is_a_copy_and_leaves_no_file(kept_in_files: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(3, LARGE // 2).to(dtype)
    copy = kept(tensor)
    before = tensor.clone()
    tensor.zero_()
    assert torch.equal(copy, before)
    assert torch.equal(whole(copy, divided_by=2.0), before / 2)
    assert list(kept_in_files.iterdir()) == []


def test_without_room_on_the_disk_a_large_copy_lies_in_memory(
    kept_in_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", full)
    tensor = torch.randn(LARGE)
    assert torch.equal(kept(tensor), tensor)
    assert list(kept_in_files.iterdir()) == []


def test_large_copies_lie_in_memory_as_long_as_they_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = []
    monkeypatch.setattr("os.posix_fallocate", lambda *arguments: files.append(arguments))
    monkeypatch.setattr(kept_tensors, "MOST_IN_MEMORY", 12 * LARGE)
    first, second = kept(torch.zeros(LARGE)), kept(torch.zeros(LARGE))  # of 4 bytes an element
    kept(torch.zeros(LARGE))  # is freed at once
    third = kept(torch.zeros(LARGE))
    assert files == []
    fourth = kept(torch.ones(LARGE))
    assert len(files) == 1
    assert all(one.sum() == 0 for one in (first, second, third))
    assert fourth.sum() == LARGE
