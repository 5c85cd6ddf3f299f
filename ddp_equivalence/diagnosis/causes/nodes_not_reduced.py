"""Gradients were averaged inside each node, and nothing was reduced between the nodes.

Where the step's own calls show the groups, the cause is ``reduced_in_wrong_group`` instead, also if
these groups are the nodes: the call is then known.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.causes.reduced_in_wrong_group import (
    hook_has_the_group,
    lines_of_wrapper,
    means_of_groups,
)
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.reduced import (
    groups_text,
    reduced_only_in_subgroups,
    separate_groups,
    wrapped_groups,
)
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The mean or the sum of the gradients of each rank's own node."""
    nodes = tuple(view.setting.ranks_by_node)
    one_rank_each = len(nodes) == view.world_size
    if len(nodes) == 1 or one_rank_each or separate_groups(view):
        return ()
    return means_of_groups(view, nodes)


def indication(view: View) -> Indication | None:
    """Looks for reductions that were all issued in groups of some ranks."""
    if separate_groups(view) or not reduced_only_in_subgroups(view):
        return None
    groups = wrapped_groups(view)
    if groups and groups != tuple(sorted(view.setting.ranks_by_node)):
        return Indication(False, f"DDP reduced in {groups_text(groups)}, which are not the nodes")
    return Indication(True, "gradients were reduced in groups of some ranks, and not among all")


def lines(view: View) -> Sequence[PointedLine]:
    """Where the groups are made, and where DDP is given one."""
    return lines_of_wrapper(view)


def fix(view: View) -> str:
    """Reduce between the nodes too."""
    if hook_has_the_group(view):
        return f"let the communication hook reduce over all {view.world_size} ranks."
    if view.observed.wrappers:
        return "give DistributedDataParallel no process_group, or reduce between the nodes too."
    return f"reduce between the {view.setting.layout.nodes} nodes too, and divide by all ranks."


HYPOTHESIS = Hypothesis(
    name="nodes_not_reduced",
    sentence="Gradients were reduced inside each node, and nothing was reduced between the nodes.",
    look_at="the process group of DistributedDataParallel or the mesh of a hybrid strategy, and "
    "the reduction between nodes that must follow",
    predict=predict,
    indication=indication,
    tell_apart="Place the ranks on other nodes: these gradients then change with it.",
    headline="nothing is reduced between nodes",
    lines=lines,
    fix=fix,
)
