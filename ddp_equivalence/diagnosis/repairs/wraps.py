"""Edits that do something more with a value: divide it, detach it, or call a function with it.

They are tried where a value goes: a right-hand side, an argument, a term of a sum, a result.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place
from ddp_equivalence.diagnosis.repairs.names_in_scope import arguments_of
from ddp_equivalence.diagnosis.repairs.over_ranks import reducers
from ddp_equivalence.diagnosis.repairs.parentheses import joined

MOST_FUNCTIONS = 3
MOST_DIVISORS = 3

STARTS = {"start", "offset", "first", "begin", "base"}

# What these return is no tensor, and no number that is divided by the world size.
NO_TENSORS = {
    *("range", "enumerate", "zip", "list", "tuple", "dict", "set", "sorted", "reversed", "str"),
    *("parameters", "named_parameters", "items", "keys", "values", "isinstance", "getattr", "id"),
    *("chunk", "split", "state_dict", "append", "backward", "step", "zero_grad", "to_list", "len"),
    *(
        "get_rank",
        "get_world_size",
        "SGD",
        "Adam",
        "AdamW",
        "DistributedDataParallel",
        "all_reduce",
    ),
    *("arange", "randperm", "new_group", "broadcast", "device", "Generator", "manual_seed", "size"),
    *(
        "named_modules",
        "modules",
        "children",
        "get_group",
        "init_device_mesh",
        "dim",
        "filter",
        "map",
    ),
}


def computes_tensor(node: ast.expr, place: Place) -> bool:
    """False for what is known to be no tensor, and no number that could be divided."""
    if isinstance(node, ast.Call):
        called = place.called_name(node)
        return called not in NO_TENSORS and not called[:1].isupper()
    return place.may_be_tensor(node)


def goes_somewhere(node: ast.expr, place: Place) -> bool:
    """True for a value that may be a tensor and stands as a whole where it is used."""
    if not computes_tensor(node, place):
        return False
    match place.parent(node):
        case ast.Assign() | ast.AugAssign() | ast.AnnAssign() | ast.Return():
            return True
        case ast.keyword() | ast.Lambda() | ast.IfExp():
            return True
        case ast.Call() as call:
            called = place.called_name(call)
            of_module = place.text(call.func).split(".")[0] in place.facts.modules
            return call.func is not node and called not in NO_TENSORS and not of_module
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return True
        case ast.Attribute(attr="backward"):
            return True
        case ast.Tuple() as values:
            return isinstance(place.parent(values), ast.Return)
        case _:
            return False


def divided_by_world_size(node: ast.expr, place: Place) -> Iterator[Change]:
    """A sum over ranks was forgotten to be divided, or every rank adds the whole of something."""
    if goes_somewhere(node, place) and (world_size := place.world_size()):
        yield place.replaced(node, joined(place.text(node), "/", world_size))


def multiplied_by_world_size(node: ast.expr, place: Place) -> Iterator[Change]:
    """Something else divides by the world size as well, as DDP does."""
    if goes_somewhere(node, place) and (world_size := place.world_size()):
        yield place.replaced(node, joined(place.text(node), "*", world_size))


def detached(node: ast.expr, place: Place) -> Iterator[Change]:
    """A gradient flows back through something that should count as a constant."""
    if goes_somewhere(node, place) and not place.text(node).endswith(".detach()"):
        yield place.replaced(node, f"{place.closed(node)}.detach()")


def cloned(node: ast.expr, place: Place) -> Iterator[Change]:
    """Two names stand for one tensor, and what changes one of them changes the other."""
    if not isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        return
    match place.parent(node):
        case ast.Call(func=ast.Attribute(attr="append" | "setdefault" | "insert" | "apply")):
            is_kept = not place.is_called(node)
        case ast.Assign() | ast.AnnAssign() | ast.Return() | ast.Dict() | ast.keyword():
            is_kept = True
        case _:
            is_kept = False
    if is_kept and computes_tensor(node, place):
        yield place.replaced(node, f"{place.text(node)}.clone()")


def requires_grad(node: ast.Call, place: Place) -> Iterator[Change]:
    """A detached tensor is computed with anew, and gets no gradient of its own."""
    if place.called_name(node) == "detach" and not isinstance(place.parent(node), ast.Attribute):
        yield place.replaced(node, f"{place.text(node)}.requires_grad_()")


def function_applied(node: ast.expr, place: Place) -> Iterator[Change]:
    """The file has a function for this, and its call was forgotten in one place."""
    is_number = isinstance(node, ast.Name) and place.scope.described_as_number(node.id)
    parent = place.parent(node)
    if not goes_somewhere(node, place) and not (is_number and isinstance(parent, ast.Assign)):
        return
    around = place.text(parent.func) if isinstance(parent, ast.Call) else ""
    own = place.called_name(node) if isinstance(node, ast.Call) else ""
    functions = [
        name
        for name, takes in place.facts.functions_at(node).items()
        if takes == 1 and name != around and name.rsplit(".", 1)[-1] != own
    ]
    for name in functions[:MOST_FUNCTIONS]:
        yield place.replaced(node, f"{name}({place.text(node)})")


def function_applied_to_all(node: ast.Call, place: Place) -> Iterator[Change]:
    """The file has a function for this, and its call was forgotten for all of some arguments."""
    called = place.text(node.func)
    is_of_torch = called.split(".")[0] in place.facts.modules
    tensors = [one for one in node.args if computes_tensor(one, place)]
    if is_of_torch or len(tensors) != len(node.args) or len(tensors) < 2 or node.keywords:
        return
    given = [place.text(one) for one in node.args]
    for name in reducers(place, node):
        if place.facts.functions_at(node)[name] == 1 and name != called:
            applied = ", ".join(f"{name}({one})" for one in given)
            yield place.replaced(node, f"{called}({applied})")


def times_an_argument(node: ast.expr, place: Place) -> Iterator[Change]:
    """A backward pass forgets the gradient that it is given, as if that were always 1."""
    function = place.scope.function
    if getattr(function, "name", "") != "backward" or not isinstance(
        place.parent(node), ast.Return
    ):
        return
    for argument in arguments_of(function)[1:]:
        given = f"{argument.arg}[0]" if argument is function.args.vararg else argument.arg
        if isinstance(node, ast.Tuple):
            parts = [
                place.text(one)
                if isinstance(one, ast.Constant)
                else joined(given, "*", place.text(one))
                for one in node.elts
            ]
            yield place.replaced(node, ", ".join(parts))
        elif place.text(node).endswith(".saved_tensors"):
            yield place.replaced(node, f"tuple({given} * one for one in {place.text(node)})")
        elif place.may_be_tensor(node) and argument.arg not in place.text(node).split():
            yield place.replaced(node, joined(given, "*", place.text(node)))


def another_divisor(node: ast.expr, place: Place) -> Iterator[Change]:
    """A sum is divided by the number of something else than of what was added up."""
    match place.parent(node):
        case ast.BinOp(op=ast.Div() | ast.FloorDiv(), right=right) if right is node:
            pass
        case ast.AugAssign(op=ast.Div(), value=value) if value is node:
            pass
        case ast.Call(func=ast.Attribute(attr="div_" | "div"), args=[first, *_]) if first is node:
            pass
        case _:
            return
    divisors = [place.world_size(), *place.scope.lengths()]
    text = place.text(node)
    if text.endswith(".local_world_size"):  # what is averaged over nodes afterwards
        rank = text.removesuffix(".local_world_size")
        divisors.insert(0, f"({rank}.world_size / {rank}.nodes)")
    for divisor in [one for one in divisors if one and one != place.text(node)][:MOST_DIVISORS]:
        yield place.replaced(node, divisor)


def rank_times_count(node: ast.expr, place: Place) -> Iterator[Change]:
    """The place of this rank's rows is its number times how many rows each rank has."""
    text = place.text(node)
    is_number = text in ("rank", "get_rank()") or text.endswith((".rank", ".get_rank()"))
    if not is_number or not isinstance(place.parent(node), ast.Call | ast.keyword | ast.BinOp):
        return
    for count in place.scope.counts()[:MOST_DIVISORS]:
        yield place.replaced(node, joined(text, "*", count))


def diagonal_of_the_rank(node: ast.Call, place: Place) -> Iterator[Change]:
    """The rows of this rank are not the first among those of all ranks, nor is their diagonal."""
    match node:
        case ast.Call(func=ast.Attribute(value=square, attr="fill_diagonal_")):
            pass
        case ast.Call(func=ast.Attribute(attr="eye"), args=[square, _]):
            pass
        case _:
            return
    names = [one.id for one in ast.walk(square) if isinstance(one, ast.Name)]
    rows = [f"len({one})" for one in names if one in place.scope.names]
    if isinstance(node.func, ast.Attribute) and node.func.attr == "eye":
        rows = [place.text(square)]
    for count in rows[:1]:
        own = [
            f"{name}({count})"
            for name, takes in place.facts.functions_at(node).items()
            if takes == 1 and set(name.split("_")) & STARTS
        ]
        rank = _rank_or_none(place)
        for start in [*own, *([joined(rank, "*", count)] if rank else [])][:MOST_DIVISORS]:
            yield place.replaced(node, f"{place.text(node)}.roll({start}, 1)")


def _rank_or_none(place: Place) -> str | None:
    """The number of this rank, or 0 where one process computes the big batch."""
    rank, get_rank = place.rank(), place.facts.get_rank
    is_initialized = place.facts.imported_as("torch.distributed.is_initialized")
    if rank == get_rank and is_initialized:
        return f"{rank} if {is_initialized}() else 0"
    return rank


def counted_from_the_rank(node: ast.Call, place: Place) -> Iterator[Change]:
    """Rows are numbered from 0 on every rank, but each rank has other rows of the whole."""
    match node:
        case ast.Call(func=ast.Name(id="enumerate"), args=[rows], keywords=[]):
            rank = _rank_or_none(place)
            if rank and isinstance(rows, ast.Name | ast.Attribute | ast.Subscript):
                start = joined(rank, "*", f"len({place.text(rows)})")
                yield place.replaced(node, f"enumerate({place.text(rows)}, {start})")
        case _:
            return


def offset_of_the_rank(node: ast.Call, place: Place) -> Iterator[Change]:
    """Rows are counted from 0 on every rank, but each rank has other rows of the whole."""
    match node:
        case ast.Call(func=ast.Attribute(attr="arange"), args=[*_, count]):
            known = [*place.scope.names, *place.facts.own_attributes(node)]
            starts = [one for one in known if set(one.removeprefix("self.").split("_")) & STARTS]
            rank = place.rank()
            if rank and len(node.args) == 1:
                starts.append(joined(rank, "*", place.text(count)))
            for start in starts[:MOST_DIVISORS]:
                yield place.replaced(node, joined(place.text(node), "+", start))
        case _:
            return
