"""Errors that CUDA and NCCL raise on ranks, and what the owner of the machine can do about them.

Only the errors' own texts tell them apart. They are those of CUDA's runtime (cudaGetErrorString)
and of the log lines that NCCL prints.
"""

from __future__ import annotations

REMEDIES = (
    (
        ("driver version is insufficient", "NVIDIA driver on your system is too old"),
        "the driver is too old for this build of torch: update it, or install a build of torch for "
        "an older CUDA version",
    ),
    (
        ("unsupported display driver / cuda driver combination",),
        "the driver's parts have different versions: restart the machine, or in a container the "
        "container; do not mix NVIDIA's package cuda-compat with a newer driver",
    ),
    (
        ("CUDA in forked subprocess",),
        "a module that every Python process here imports has started CUDA: set "
        "DDP_EQUIVALENCE_START_METHOD=spawn",
    ),
    (
        ("no kernel image is available",),
        "this build of torch has no kernels for the GPU: install another build of torch",
    ),
    (
        ("busy or unavailable",),
        "the GPU takes one process at a time (compute mode EXCLUSIVE_PROCESS), and another one has "
        "it, or it takes none (PROHIBITED): see nvidia-smi -q -d COMPUTE, and change the mode or "
        "end the other process",
    ),
    (
        ("out of memory",),
        "other processes hold the GPU's memory: see nvidia-smi, and wait for them or end them",
    ),
    (
        ("system not yet initialized",),
        "GPUs that are connected by NVSwitch need NVIDIA's Fabric Manager in the driver's version: "
        "see `systemctl status nvidia-fabricmanager`",
    ),
    (
        ("/dev/shm", "shared memory segment"),
        "NCCL found too little shared memory: start the container with --ipc=host, or with "
        "--shm-size=1g --ulimit memlock=-1",
    ),
    (
        ("uncorrectable ECC error", "has fallen off the bus", "GPU is lost"),
        "the GPU's hardware has failed: see what `sudo dmesg | grep Xid` says, and then restart "
        "the machine; leave the GPU out of CUDA_VISIBLE_DEVICES until then",
    ),
    (
        ("CUDA error: unknown error", "CUDA unknown error", "forward compatibility was attempted"),
        "the driver is not set up completely: restart the machine or the container, and see "
        "whether nvidia-smi works",
    ),
    (
        ("Duplicate GPU detected",),
        "two ranks of NCCL got the same GPU: look for a GPU that CUDA_VISIBLE_DEVICES names twice, "
        "or for two instances of one divided GPU (MIG)",
    ),
)
"""Each: parts of the text of an error, and the remedy."""


def what_to_do(error: str) -> str:
    """The remedy for an error that is known; "" for any other."""
    for texts, remedy in REMEDIES:
        if any(text in error for text in texts):
            return remedy
    return ""
