"""Writes tensors to a file of the safetensors format, one after the other.

The library's own ``save_file`` first copies all of them to memory, which a model that nearly fills
the memory does not leave. The library reads what is written here.

Source of the format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
"""The names of dtypes in the format."""

ALIGNMENT = 8


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write dense tensors of the CPU. Raises ValueError for a dtype that the format lacks."""
    header: dict[str, object] = {}
    begin = 0
    # As the library does: the largest elements first, so that all of them are aligned.
    items = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in items:
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} has the dtype {tensor.dtype}, which cannot be written")
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, tensor in items:
            if tensor.numel():
                flat = tensor.detach().contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().data)
