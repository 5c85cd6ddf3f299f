"""How the user's file can add up a number over all ranks, and which of its functions do."""

from __future__ import annotations

import ast
from functools import lru_cache

from ddp_equivalence.diagnosis.repairs.change import Place
from ddp_equivalence.diagnosis.repairs.source import Source

COLLECTIVES = {"all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"}
FRESH_NAMES = ("count", "number", "count_of_all", "number_of_all")
MEANS = {"mean", "average", "averaged", "avg"}


def reducers(place: Place, node: ast.AST) -> list[str]:
    """The functions of the file, as they are called at a node, that reduce over ranks."""
    found = _names_of_reducers(place.source)
    if not found:
        return []
    return [name for name in place.facts.functions_at(node) if name.rpartition(".")[2] in found]


def is_reducer(call: ast.Call, place: Place) -> bool:
    """True for a call that gives the sum or mean over ranks of what it is given.

    What is called is a function of the file, or one of torch that returns what it computes.
    """
    name = place.called_name(call)
    if name in COLLECTIVES:
        return not isinstance(place.parent(call), ast.Expr)
    is_of_a_module = place.text(call.func).split(".")[0] in place.facts.modules
    return name in _names_of_reducers(place.source) and not is_of_a_module


def is_mean(call: ast.Call, place: Place) -> bool:
    """True for a call of a function whose name says that it gives a mean."""
    return bool(set(place.called_name(call).strip("_").split("_")) & MEANS)


def reduces(statement: ast.stmt, name: str, place: Place) -> bool:
    """True for a statement that reduces a local variable in place."""
    for node in ast.walk(statement):
        match node:
            case ast.Call(args=[ast.Name(id=given), *_]) if given == name:
                called = place.called_name(node)
                if called == "all_reduce" or called in _names_of_reducers(place.source):
                    return True
            case _:
                pass
    return False


def total_of(number: str, node: ast.AST, place: Place, counted: str = "") -> str | None:
    """An expression with a number of this rank, added up over all ranks.

    ``counted``: what the number is the length of, for a function of the file that counts.

    A function of the file is used where there is one: it may know what to do without ranks.
    """
    tensor = place.facts.imported_as("torch.tensor")
    if tensor is None:
        return None
    fresh = f"{tensor}({number})"
    needed = place.facts.functions_at(node)
    bodies = _functions(place.source)
    for function in reducers(place, node):
        body = bodies[function.rpartition(".")[2]]
        if needed[function] == 1 and _only_adds(body):
            counts = counted and _calls(body) & {"len", "numel", "size"}
            return f"{function}({counted if counts else fresh})"
    if place.facts.all_reduce is None:
        return None
    name = next((one for one in FRESH_NAMES if one not in place.scope.names), "n")
    return f"({name} := {fresh}, {place.facts.all_reduce}({name}))[0]"


@lru_cache(maxsize=8)
def _names_of_reducers(source: Source) -> frozenset[str]:
    """The functions that call a collective, or one that does, and return something."""
    bodies = {
        name: one
        for name, one in _functions(source).items()
        if any(isinstance(node, ast.Return) and node.value for node in ast.walk(one))
    }
    found = {name for name, one in bodies.items() if _calls(one) & COLLECTIVES}
    found |= {name for name, one in bodies.items() if len(one.body) == 1 and _calls(one) & found}
    return frozenset(found - {"forward", "__call__", "backward", "step", "__init__"})


@lru_cache(maxsize=8)
def _functions(source: Source) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef)}


def _calls(function: ast.FunctionDef) -> set[str]:
    found = set()
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                found.add(name)
            case _:
                pass
    return found


def _only_adds(function: ast.FunctionDef) -> bool:
    """True for a function that calls all_reduce, and divides nothing."""
    divides = any(
        isinstance(node, ast.Div) or (isinstance(node, ast.keyword) and node.arg == "op")
        for node in ast.walk(function)
    )
    return "all_reduce" in _calls(function) and not divides and "div_" not in _calls(function)
