"""Peak memory of the judging process while a large model is compared, in copies of its gradients.

python benchmarks/large_model.py [--parameters 100000000] [--dtype float64]
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
from torch import Tensor, nn

from ddp_equivalence import Case, check

WIDTH = 1000
EXAMPLES = 4


def peak_bytes() -> int:
    """The most memory that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def case_of(parameters: int, dtype: torch.dtype) -> Case:
    """A chain of square linear layers with about this many parameters."""
    layers = max(1, round(parameters / WIDTH**2))

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))

    def batch(generator: torch.Generator) -> Tensor:
        return torch.randn(EXAMPLES, WIDTH, generator=generator)

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return (WIDTH * model(rows)).square().mean()

    return Case(model=build, batch=batch, loss=loss, layout="1x2", dtype=dtype)


def main() -> None:
    """Print one line a figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    # What torch and the ranks cost by themselves, before the large model is there.
    check(case_of(WIDTH**2, dtype), "ddp_mean")
    before = peak_bytes()
    case = case_of(arguments.parameters, dtype)
    started = time.monotonic()
    verdict = check(case, "ddp_mean", deadline=500.0)
    seconds = time.monotonic() - started
    assert verdict.comparison is not None
    copy = verdict.comparison.elements * dtype.itemsize
    print(f"outcome                 {verdict.outcome}")
    print(f"error, limit            {verdict.error:.1e}, {verdict.limit:.1e}")
    print(f"parameters compared     {verdict.comparison.elements:,} on 2 ranks, {arguments.dtype}")
    print(f"one copy of gradients   {copy / 2**20:.0f} MiB")
    print(f"peak of judging process {(peak_bytes() - before) / 2**20:.0f} MiB above its start")
    print(f"copies of gradients     {(peak_bytes() - before) / copy:.2f}")
    print(f"seconds                 {seconds:.1f}")


if __name__ == "__main__":
    main()
