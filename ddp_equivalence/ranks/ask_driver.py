"""A program: ask the GPU's driver how many devices a process sees, and print the answer.

It runs in a process of its own, because the question initialises the driver. It imports nothing but
the standard library, so that it starts fast. It prints one line: the number of devices, and after
it the driver's reason if there are none.
"""

from __future__ import annotations

import ctypes
import sys


def ask_cuda(library: str) -> tuple[int, str]:
    """How many devices CUDA shows, and why none.

    Source: CUDA Driver API, sections 6.3 (cuInit), 6.5 (cuDeviceGetCount), 6.1 (cuGetErrorString).
    """
    cuda = ctypes.CDLL(library)
    count = ctypes.c_int()
    for error in (cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count))):
        if error:
            text = ctypes.c_char_p()
            cuda.cuGetErrorString(error, ctypes.byref(text))
            return 0, f"CUDA error {error}: {(text.value or b'unknown').decode()}"
    return count.value, ""


def ask_hip(library: str) -> tuple[int, str]:
    """How many devices HIP shows, and why none. Source: HIP Runtime API, device management."""
    hip = ctypes.CDLL(library)
    count = ctypes.c_int()
    error = hip.hipGetDeviceCount(ctypes.byref(count))
    if error:
        hip.hipGetErrorString.restype = ctypes.c_char_p
        return 0, f"HIP error {error}: {hip.hipGetErrorString(error).decode()}"
    return count.value, ""


def main(kind: str, library: str) -> None:
    """Print the answer. ``kind``: "cuda" or "hip"."""
    try:
        count, reason = {"cuda": ask_cuda, "hip": ask_hip}[kind](library)
    except OSError as error:
        count, reason = 0, f"no driver was found: {error}"
    sys.stdout.write(f"{count} {reason}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
