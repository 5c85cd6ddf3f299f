"""What may stand in the holes of patterns, and what the holes of replacements are filled with.

A function under ``@kind`` is the test of the holes with its name, and one under ``@choice`` gives
the texts that are tried in them, the most likely first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from ddp_equivalence.diagnosis.lines.source import called_name
from ddp_equivalence.diagnosis.repairs.patterns import KINDS, Found, choice, kind
from ddp_equivalence.diagnosis.repairs.source import (
    NUMBERS_OF_A_RANK,
    Site,
    likeness,
    parameters_of,
)

MOST_GUESSED = 3
MOST_NAMES = 8
MOST_ATTRIBUTES = 4

# Calls without which nothing works, or that return no tensor and no number.
NEEDED = {
    *("range", "enumerate", "zip", "super", "isinstance", "getattr", "hasattr", "open", "next"),
    *("parameters", "named_parameters", "items", "get_group", "size", "get_rank", "manual_seed"),
    *("get_world_size", "chunk", "split", "unbind", "init_device_mesh", "filter", "map"),
}
NO_TENSORS = NEEDED | {
    *("list", "tuple", "dict", "set", "sorted", "reversed", "str", "keys", "values", "id", "dim"),
    *("state_dict", "append", "backward", "step", "zero_grad", "to_list", "len", "all_reduce"),
    *("arange", "randperm", "new_group", "broadcast", "device", "named_modules", "modules"),
    "children",
}

# Functions that return their first argument changed, in the same shape.
KEEPS_THE_SHAPE = {
    *("clamp", "normalize", "dropout", "round", "roll", "flip", "nan_to_num", "islice", "where"),
    *("softmax", "log_softmax", "relu", "max", "min", "pad", "sorted", "mul", "div", "getitem"),
}

# Calls with one of these words in their name compute what a name often holds already.
STATISTICS = {
    *("mean", "sum", "max", "min", "amax", "amin", "var", "variance", "std", "norm", "average"),
    *("count", "numel", "len", "size", "number", "total", "moments", "detach"),
}

MARGIN = 1e-4
"""A smaller number only keeps a division from failing."""

_JUMPS = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def last_word(node: Any) -> str:
    """The name of a function or method, without what stands before it."""
    return node if isinstance(node, str) else ast.unparse(node).rpartition(".")[2]


def words(name: str) -> set[str]:
    """The words of a name."""
    return set(name.strip("_").split("_"))


KINDS |= {
    "variable": lambda site, node, found: isinstance(node, ast.Name),
    "unsigned": lambda site, node, found: not isinstance(node, ast.UnaryOp),
    "number": lambda site, node, found: type(getattr(node, "value", None)) in (int, float),
    "order": lambda site, node, found: isinstance(node, ast.Name) and site.may_be_tensor(node),
    "needless": lambda site, node, found: last_word(node) not in NEEDED,
    "shaping": lambda site, node, found: last_word(node) in KEEPS_THE_SHAPE,
    "statistic": lambda site, node, found: bool(words(called_name(node)) & STATISTICS),
    "result": lambda site, node, found: getattr(site.scope.function, "name", "") == "backward",
    "index": lambda site, node, found: (
        isinstance(node, ast.BinOp)
        or (isinstance(node, ast.Name) and site.scope.describes(node.id, "int", "float"))
    ),
}


# Values: where they go, and what they are.


@kind
def tensor(site: Site, node: Any, found: Found) -> bool:
    """A value that may be a tensor."""
    if isinstance(node, ast.Call):
        return called_name(node) not in NO_TENSORS and not called_name(node)[:1].isupper()
    return site.may_be_tensor(node)


@kind
def value(site: Site, node: Any, found: Found) -> bool:
    """A value that may be a tensor and stands as a whole where it is used."""
    if not tensor(site, node, found):
        return False
    match site.parent:
        case ast.Call() as call:
            is_argument = call.func is not node and called_name(call) not in NO_TENSORS
            return is_argument and not site.is_of_a_module(call.func)
        case ast.Tuple() as values:
            return isinstance(site.source.parents[values], ast.Return)
        case ast.Attribute(attr=name):
            return name == "backward"
        case ast.BinOp(op=operator):
            return isinstance(operator, ast.Add | ast.Sub)
        case parent:
            ways = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return
            return isinstance(parent, ways | ast.keyword | ast.Lambda | ast.IfExp)


# Names, attributes and numbers.


@kind
def name(site: Site, node: Any, found: Found) -> bool:
    """A local name, which is called only if it is that of a function."""
    if not isinstance(node, ast.Name) or node.id not in site.scope.values:
        return False
    is_function = site.scope.values[node.id] == "function"
    return node.id not in ("self", "cls", "ctx") and (is_function or not site.is_called(node))


@kind
def attribute(site: Site, node: Any, found: Found) -> bool:
    """An attribute that is not called, and no number of the rank."""
    if not isinstance(node, ast.Attribute) or site.is_called(node):
        return False
    of_rank = ast.unparse(node.value).rsplit(".", 1)[-1].strip("_") == "rank"
    return not (of_rank and node.attr in NUMBERS_OF_A_RANK)


@kind
def whole(site: Site, node: Any, found: Found) -> bool:
    """An object of which a part is taken, and not called."""
    text = ast.unparse(node)
    is_part = not site.is_called(site.node) and not site.is_of_a_module(node)
    return is_part and text not in ("self", "ctx", "cls", "super()")


@kind
def receiver(site: Site, node: Any, found: Found) -> bool:
    """An object whose method is called, and the result is used."""
    is_own = ast.unparse(node) in ("self", "super()")
    return not (is_own or site.is_of_a_module(node) or isinstance(site.parent, ast.Expr))


@kind
def argument(site: Site, node: Any, found: Found) -> bool:
    """An argument whose call has a result that is used."""
    is_plain = not isinstance(node, ast.GeneratorExp | ast.Constant)
    return is_plain and not isinstance(site.parent, ast.Expr)


@kind
def assignable(site: Site, node: Any, found: Found) -> bool:
    """An argument or receiver to which a result can be assigned."""
    text = ast.unparse(node)
    if isinstance(node, ast.Name):
        return text in site.scope.values and text not in ("self", "ctx")
    return isinstance(node, ast.Attribute | ast.Subscript) and not site.is_of_a_module(node)


# Functions and statements.


@kind
def target(site: Site, node: Any, found: Found) -> bool:
    """What is assigned, and has had a value before."""
    if isinstance(node, ast.Tuple) or getattr(site.scope.function, "name", "") == "__init__":
        return False
    return not isinstance(node, ast.Name) or site.is_bound_elsewhere(node.id)


@kind
def reducible(site: Site, node: Any, found: Found) -> bool:
    """A name or attribute that gets a value that may be a tensor."""
    assigned = getattr(site.node, "value", None)
    is_target = isinstance(node, ast.Name | ast.Attribute)
    is_tensor = is_target and site.scope.describes(ast.unparse(node), "tensor")
    return is_tensor and assigned is not None and tensor(site, assigned, found)


@kind
def statement(site: Site, node: Any, found: Found) -> bool:
    """A statement without which the rest can run."""
    match node:
        case ast.Pass() | ast.Return() | ast.Continue() | ast.Break() | ast.FunctionDef():
            return False
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return site.is_bound_elsewhere(name)
        case ast.Assign(targets=[ast.Tuple()]):
            return False
    return True


@kind
def following(site: Site, node: Any, found: Found) -> bool:
    """A statement that may as well come before the first one of the pattern."""
    one = found["preceding"]
    if isinstance(one, _JUMPS + _DEFINITIONS) or isinstance(node, _JUMPS + _DEFINITIONS):
        return False
    if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
        return False
    only_names = all(
        isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
        for each in (one, node)
    )
    new = _names(one, ast.Store) & _names(node, ast.Load)
    return not only_names and not (new and isinstance(one, ast.Assign | ast.AnnAssign | ast.With))


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    names = (one for one in ast.walk(node) if isinstance(one, ast.Name))
    return {one.id for one in names if isinstance(one.ctx, context)}


# Numbers of ranks and of examples.


@choice
def world_size(site: Site, found: Found) -> Iterable[str]:
    """The number of ranks."""
    return [site.world_size] if site.world_size else []


@choice
def all_reduce(site: Site, found: Found) -> Iterable[str]:
    """The function of torch.distributed."""
    called = site.source.imported_as("torch.distributed.all_reduce")
    return [called] if called else []


@choice
def other_divisor(site: Site, found: Found) -> Iterable[str]:
    """Other numbers that a sum may have to be divided by."""
    divisor = ast.unparse(found["y"])
    if divisor.endswith(".local_world_size"):  # what is averaged over nodes afterwards
        rank = divisor.removesuffix(".local_world_size")
        yield f"{rank}.world_size / {rank}.nodes"
    yield from world_size(site, found)
    loops = (one for one in ast.walk(site.scope.function) if isinstance(one, ast.For))
    names = (one for loop in loops for one in ast.walk(loop.iter) if isinstance(one, ast.Name))
    lists = dict.fromkeys(one.id for one in names if one.id in site.scope.values)
    yield from [f"len({one})" for one in lists][: MOST_GUESSED - 1]


# Names, attributes, functions and options.


@choice
def other_name(site: Site, found: Found) -> Iterable[str]:
    """Names whose values are like that of the name."""
    own = found["name"].id
    names = site.scope.names_before(site.line, own)
    known = site.scope.values
    alike = [one for one in names if one != own and known[one] == known[own]]
    return alike[: MOST_NAMES if known[own] else MOST_GUESSED]


@choice
def name_at_hand(site: Site, found: Found) -> Iterable[str]:
    """Names that may hold what the call computes."""
    used = _names(site.node, ast.Load)
    return [
        one
        for one in site.scope.names_before(site.line, called_name(site.node))
        if site.scope.describes(one, "tensor", "int", "float") and one not in used
    ][:MOST_GUESSED]


@choice
def attribute_beside(site: Site, found: Found) -> Iterable[str]:
    """Other attributes of the same object that hold the like."""
    node = found["attribute"]
    owner, known = ast.unparse(node.value), site.scope.values
    own = known.get(f"{owner}.{node.attr}", "")
    listed = [*site.source.attributes.get(site.source.owner(node.value), [])]
    if owner == "self":
        listed += [one.removeprefix("self.") for one in known if one.startswith("self.")]
    listed += [one for fields in site.source.fields if node.attr in fields for one in fields]
    others = [one for one in dict.fromkeys(listed) if one != node.attr and one[:2] != "__"]
    alike = [one for one in others if not own or known.get(f"{owner}.{one}", own) == own]
    alike.sort(key=lambda one: -likeness(node.attr, one))
    return [f"{owner}.{one}" for one in alike[:MOST_ATTRIBUTES]]


@choice
def times_gradient(site: Site, found: Found) -> Iterator[str]:
    """The returned gradients times the one that the backward method is given."""
    function, returned = site.scope.function, found["result"]
    for given in parameters_of(function)[1:]:
        given += "[0]" if function.args.vararg and given == function.args.vararg.arg else ""
        if isinstance(returned, ast.Tuple):
            texts = [
                ast.unparse(one)
                if isinstance(one, ast.Constant | ast.Starred)
                else f"{given} * ({ast.unparse(one)})"
                for one in returned.elts
            ]
            yield f"({', '.join(texts)},)"
        elif ast.unparse(returned).endswith(".saved_tensors"):
            yield f"tuple(({given} * one for one in {ast.unparse(returned)}))"
        elif site.may_be_tensor(returned) and given not in ast.unparse(returned).split():
            yield f"{given} * ({ast.unparse(returned)})"


@choice
def other_number(site: Site, found: Found) -> Iterable[str]:
    """Numbers near one, and those that have a meaning of their own."""
    given = found["number"].value
    if isinstance(given, int):
        negative = isinstance(site.parent, ast.UnaryOp)
        near = (given + 1, given - 1)
        others = (1, 0, *near) if negative else (*near, -given, 0, 1)
        return [str(one) for one in others if one != given]
    rest = [round(1 - given, 12)] if MARGIN < given < 1 - MARGIN else []
    return [repr(one) for one in (1.0, 0.0, *rest) if one != given and abs(given) > MARGIN]
