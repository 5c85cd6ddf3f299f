"""``ddp-equivalence explain``: which learning rate and batch size keep a training the same."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from ddp_equivalence.case import settings
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import DIFFERENT, NOT_JUDGED, SAME
from ddp_equivalence.commands.explain import KnownGood, Setup, explain
from ddp_equivalence.commands.explain.data import as_data
from ddp_equivalence.commands.explain.setup import Loss, Optimizer, Parallelism
from ddp_equivalence.commands.results import look_at_file, write_json
from ddp_equivalence.report.terminal import width_of

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands

CODE_OF_VERIFICATION = {"agrees": SAME, "differs": DIFFERENT, "unknown": NOT_JUDGED}


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "explain",
        help="say which batch size and learning rate keep training the same, for a setup",
        description="Says how the gradient of a setup compares with one big batch's, which "
        "learning rate follows from one that worked on one device, and how many steps an epoch "
        "has. Exit code 0; 2: bad input; with --verify 1 if ranks find something else, 3 if they "
        "could not judge.",
    )
    _add_setup_options(parser)
    parser.add_argument(
        "--known-good",
        metavar="BATCH@LR",
        help="the effective batch and learning rate that worked on one device, such as 16@0.01",
    )
    parser.add_argument(
        "--known-loss",
        choices=("mean", "sum"),
        help="the reduction of the loss on that device; default mean",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="run the setup on ranks and check the gradient; with SGD it also trains three steps "
        "with the rate for the same batch",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write machine-readable results")


def _add_setup_options(parser: argparse.ArgumentParser) -> None:
    _add_batch_options(parser)
    parser.add_argument(
        "--loss",
        choices=get_args(Loss),
        default="mean",
        help="the reduction of each rank's loss; default mean",
    )
    parser.add_argument(
        "--parallelism",
        choices=get_args(Parallelism),
        default="ddp",
        help="default ddp; hybrid: one process a node, DataParallel inside it and DDP between the "
        "nodes; all-reduce-sum: an all_reduce of your own that does not divide",
    )
    parser.add_argument(
        "--examples", type=int, metavar="N", help="the size of the dataset, for steps per epoch"
    )
    parser.add_argument("--drop-last", action="store_true", help="drop_last of the DataLoader")
    parser.add_argument(
        "--optimizer", choices=get_args(Optimizer), default="sgd", help="default sgd"
    )


def _add_batch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        default=1,
        metavar="N",
        help="default 1; with data-parallel and hybrid, the GPUs that one process drives",
    )
    parser.add_argument(
        "--batch",
        type=int,
        required=True,
        metavar="B",
        help="the examples that one process takes for one micro-batch: DDP's batch is per rank, "
        "DataParallel's is split over its GPUs",
    )
    parser.add_argument(
        "--accumulation", type=int, default=1, metavar="K", help="micro-batches per optimizer step"
    )
    divided = parser.add_mutually_exclusive_group()
    divided.add_argument(
        "--accumulation-divided",
        action="store_true",
        default=None,
        help="the loss of each micro-batch is divided by the number of micro-batches",
    )
    divided.add_argument(
        "--accumulation-not-divided",
        action="store_false",
        dest="accumulation_divided",
        help="it is not divided: the gradients of the micro-batches add up",
    )


def run(known: argparse.Namespace) -> int:
    """Explain the setup, verify it if asked to, and return the exit code. Raises BadCase."""
    look_at_file("json", known.json)
    explanation = explain(setup_of(known))
    with settings.using(settings.replaced(width=width_of(sys.stdout, settings.current().width))):
        print(explanation, end="", flush=True)
        if not known.verify:
            write_json("json", known.json, as_data(explanation))
            return SAME
        from ddp_equivalence.ranks.server import start_early

        start_early()  # the server imports torch while this process does
        from ddp_equivalence.commands.explain.verification import verify

        write_json("json", known.json, as_data(explanation))  # the ranks may fail
        verification = verify(explanation)
        print(f"\n{verification}", end="")
    write_json("json", known.json, as_data(explanation) | {"verification": verification.as_data()})
    return CODE_OF_VERIFICATION[verification.outcome]


def setup_of(known: argparse.Namespace) -> Setup:
    """The setup that the arguments describe. Raises BadCase if they cannot be right."""
    if known.known_loss is not None and known.known_good is None:
        right = "left out, unless --known-good BATCH@LR says what worked"
        raise BadCase("known_loss", known.known_loss, right)
    good = known.known_good
    return Setup(
        batch=known.batch,
        nodes=known.nodes,
        ranks_per_node=known.ranks_per_node,
        accumulation=known.accumulation,
        accumulation_divided=known.accumulation_divided,
        loss=known.loss,
        parallelism=known.parallelism,
        known_good=None if good is None else KnownGood.read(good, known.known_loss or "mean"),
        examples=known.examples,
        drop_last=known.drop_last,
        optimizer=known.optimizer,
    )
