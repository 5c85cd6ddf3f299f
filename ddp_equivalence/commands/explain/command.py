"""``ddp-equivalence explain``: which learning rate and batch size keep a training the same."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from typing import Any

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import EXIT_CODE_OF_OUTCOME, SAME
from ddp_equivalence.commands.explain.explanation import explain, explanation_text
from ddp_equivalence.commands.explain.setup import CHOICES, DEFAULTS, KnownGood, Setup, setup_like

OPTIONS = {
    "batch": "the examples that one process takes for one micro-batch: with DDP the batch of one "
    "rank, with DataParallel the batch that is split over the GPUs",
    "nodes": "the number of nodes; default 1",
    "ranks_per_node": "the ranks on each node, or with data-parallel and hybrid the GPUs that one "
    "process drives; default 1",
    "accumulation": "the micro-batches of one optimizer step; default 1",
    "loss": "the reduction of each rank's loss; default mean",
    "loss_times": "what you multiply each loss by, beside what a trainer does: numbers and "
    "world-size, joined by * or /, such as world-size or, for a sum over a count of 64, 1/64",
    "tokens_over": "the tokens that a token-mean divides by: those of its micro-batch, the "
    "default, of all micro-batches of its rank, or of those of all ranks",
    "parallelism": "how the ranks train together; default ddp. hybrid: one process on each node, "
    "DataParallel inside the process and DDP between the nodes. data-parallel-loss-inside: the "
    "replicas return their losses, and you take losses.mean(). all-reduce-sum: an all_reduce of "
    "your own that does not divide",
    "examples": "the size of the dataset, for steps per epoch",
    "sampler": "how the dataset is dealt to the ranks: by torch's DistributedSampler, the default, "
    "or in full batches, as Accelerate's even_batches does",
    "optimizer": "the optimizer; default sgd",
    "betas": "Adam's betas with the known batch; default 0.9,0.999",
    "known_good": "the effective batch (over all GPUs) and the learning rate that worked, with "
    "averaged gradients or on one device, such as 16@0.01",
}
"""The fields of a Setup that are options with a value, and their help."""

TEXTS = {"loss_times": "FACTOR", "betas": "B1,B2", "known_good": "BATCH@LR"}
"""The options that are texts, as the help shows them. Without choices the others are numbers."""

HELP = "say which batch size and learning rate keep training the same, for a setup"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of the command."""
    parser.description = (
        "Say how the gradient of a setup compares with one big batch's, which "
        "learning rate follows from one that worked on one device, and how many steps an epoch "
        "has. Exit code 0: done, 2: bad input; with --verify also 1: the ranks found something "
        "else, 3: it could not be judged."
    )
    for field, text in OPTIONS.items():
        name = f"--{field.replace('_', '-')}"
        names = (name, "--gpus-per-node") if field == "ranks_per_node" else (name,)
        if field in CHOICES:
            parser.add_argument(*names, choices=CHOICES[field], help=text)
        else:
            kind, metavar = (str, TEXTS[field]) if field in TEXTS else (int, "N")
            required = field == "batch"
            parser.add_argument(*names, type=kind, metavar=metavar, required=required, help=text)
    divided = parser.add_mutually_exclusive_group()
    for flag, value, text in (
        ("--accumulation-divided", True, "is divided by the number of micro-batches"),
        ("--accumulation-not-divided", False, "is not divided, so their gradients add up"),
    ):
        divided.add_argument(
            flag,
            action="store_const",
            const=value,
            dest="accumulation_divided",
            help=f"the loss of each micro-batch {text}",
        )
    parser.add_argument(
        "--like",
        choices=tuple(DEFAULTS),
        help="take what this trainer sets for all of the above that is not given; --accumulation "
        "is then its own setting. hf-trainer is that of transformers, nanogpt its train.py",
    )
    parser.add_argument(
        "--known-loss",
        choices=("mean", "sum"),
        help="the reduction of the loss that worked; default mean",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="run the setup on ranks: check the gradient, and the weights after three steps with "
        "the learning rate that keeps the length of a step",
    )
    parser.add_argument(
        "--full", action="store_true", help="also print how the answer follows, step by step"
    )


def run(arguments: argparse.Namespace) -> int:
    """Explain the setup, verify it with ``--verify``, and return the exit code.

    Raises BadCase for a setup that cannot be right.
    """
    explanation = explain(setup_of(arguments))
    print(explanation_text(explanation, arguments.full), end="", flush=True)
    if not arguments.verify:
        return SAME
    from ddp_equivalence.ranks.server import start_early

    start_early()  # the ranks' server imports torch while this process does
    from ddp_equivalence.commands.explain.verification import verify

    verification = verify(explanation)
    print(f"\n{verification}", end="")
    return EXIT_CODE_OF_OUTCOME[verification.outcome]


def setup_of(arguments: argparse.Namespace) -> Setup:
    """The setup that the arguments describe. Raises BadCase if they cannot be right."""
    given: dict[str, Any] = {field: getattr(arguments, field) for field in OPTIONS}
    given["accumulation_divided"] = arguments.accumulation_divided
    if arguments.known_good is not None:
        given["known_good"] = KnownGood.read(arguments.known_good, arguments.known_loss or "mean")
    elif arguments.known_loss is not None:
        right = "left out, or given together with --known-good BATCH@LR"
        raise BadCase("known_loss", arguments.known_loss, right)
    if arguments.betas is not None:
        if not re.fullmatch(r"0?\.\d{1,9},0?\.\d{1,9}", arguments.betas):
            raise BadCase("betas", arguments.betas, "two numbers below 1, such as 0.9,0.95")
        given["betas"] = tuple(map(Fraction, arguments.betas.split(",")))
    if arguments.like is not None:
        return setup_like(arguments.like, **given)
    return Setup(**{field: value for field, value in given.items() if value is not None})
