"""Edits of calls: what is called, with which arguments, and with which counts."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.over_ranks import (
    Change,
    EditSite,
    is_mean,
    is_reducer,
    total_of,
)
from ddp_equivalence.diagnosis.repairs.source import joined

# Edits of calls: what is called, whether it is called, and with which arguments.

# Functions, methods and members of torch that are mixed up: each may be meant for another.
MIXED_UP = (
    ("SUM", "AVG", "MAX", "MIN"),
    ("sum", "mean"),
    ("max", "min"),
    ("amax", "amin"),
    ("argmax", "argmin"),
    ("union", "intersection"),
    ("repeat", "repeat_interleave"),
    ("chunk", "tensor_split"),
    ("std", "var"),
    ("square", "abs"),
    ("softmax", "log_softmax"),
    ("log", "log1p"),
    ("exp", "expm1"),
    ("floor", "ceil", "round"),
    ("any", "all"),
    ("train", "eval"),
    ("detach", "clone"),
    ("contiguous", "clone"),
    ("zeros_like", "ones_like"),
    ("zeros", "ones"),
    ("zeros_like", "clone"),
    ("long", "double"),
    ("int", "float"),
    ("half", "float"),
    ("bfloat16", "float"),
    ("div_", "mul_"),
    ("div", "mul"),
    ("add_", "copy_"),
    ("scatter_", "scatter_add_"),
    ("index_copy_", "index_add_"),
    ("append", "extend"),
    ("list", "sorted"),
    ("keys", "values"),
    ("get_rank", "get_world_size"),
    ("get_rank", "get_local_rank"),
    ("no_grad", "enable_grad"),
    ("l1_loss", "mse_loss"),
)

# A keyword whose default surprises many people.
SURPRISING_DEFAULTS = {
    "zero_grad": "set_to_none=False",
    "var": "correction=0",
    "std": "correction=0",
    "cross_entropy": 'reduction="sum"',
    "nll_loss": 'reduction="sum"',
    "mse_loss": 'reduction="sum"',
    "binary_cross_entropy_with_logits": 'reduction="sum"',
    "requires_grad_": "False",
}

# Calls without which nothing works: to leave them out is never the repair.
NEEDED = {
    *("range", "enumerate", "zip", "super", "isinstance", "getattr", "hasattr", "open", "next"),
    *("parameters", "named_parameters", "items", "get_group", "size", "get_rank", "manual_seed"),
    *("get_world_size", "chunk", "split", "unbind", "init_device_mesh", "filter", "map"),
}

# Functions of several arguments that return the first one changed, in the same shape.
KEEPS_THE_SHAPE = {
    *("clamp", "normalize", "dropout", "round", "roll", "flip", "nan_to_num", "islice", "where"),
    *("softmax", "log_softmax", "relu", "max", "min", "pad", "sorted", "mul", "div", "getitem"),
}


def mixed_up(node: ast.Attribute, place: EditSite) -> Iterator[Change]:
    """Two functions of torch have names or purposes that are easily mixed up."""
    for other in _others(node.attr):
        yield place.renamed(node, other)


def mixed_up_name(node: ast.Name, place: EditSite) -> Iterator[Change]:
    """Two functions have names or purposes that are easily mixed up."""
    if place.is_called(node) and node.id not in place.scope.names:
        for other in _others(node.id):
            if hasattr(builtins, other) or other in place.facts.modules:
                yield place.replaced(node, other)


def _others(name: str) -> list[str]:
    found = [other for group in MIXED_UP if name in group for other in group if other != name]
    return list(dict.fromkeys(found))


def function_for_method(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """A statistic is that of one rank, although the file has a function for that of all ranks."""
    if isinstance(node.func, ast.Attribute) and not node.args and not node.keywords:
        for function, takes in place.facts.functions_at(node).items():
            words = function.rsplit(".", 1)[-1].split("_")
            if takes == 1 and node.func.attr in words:
                yield place.replaced(node, f"{function}({place.text(node.func.value)})")


def tensors_of_a_module(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """The list of tensors lacks the buffers, or has a shared tensor twice."""
    match node:
        case ast.Call(func=ast.Attribute(value=module, attr="parameters"), args=[], keywords=[]):
            yield place.replaced(node, f"{place.text(module)}.state_dict().values()")
        case ast.Call(
            func=ast.Attribute(
                attr="values", value=ast.Call(func=ast.Attribute(value=module, attr="state_dict"))
            )
        ):
            yield place.replaced(node, f"{place.text(module)}.parameters()")


def in_place(node: ast.Attribute, place: EditSite) -> Iterator[Change]:
    """A method changes a tensor that somebody else reads, or changes only a copy of it."""
    if not place.is_called(node) or node.attr.startswith("_"):
        return
    if node.attr.endswith("_"):
        yield place.renamed(node, node.attr[:-1])
    elif node.attr in CHANGES_IN_PLACE and place.may_be_tensor(node.value):
        yield place.renamed(node, f"{node.attr}_")


CHANGES_IN_PLACE = {
    *("add", "sub", "mul", "div", "clamp", "masked_fill", "index_add", "index_fill", "scatter_add"),
    *("sqrt", "square", "neg", "copysign", "fill", "index_copy", "lerp", "addcmul", "addcdiv"),
}


def call_left_out(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """A value was detached, cast, limited or reduced where it should be used as it is."""
    called = place.called_name(node)
    if isinstance(place.parent(node), ast.Expr) or called in NEEDED:
        return
    if isinstance(node.func, ast.Attribute):
        owner = place.text(node.func.value)
        if owner.split(".")[0] not in place.facts.modules and owner not in ("self", "super()"):
            yield place.replaced(node, owner)
    match node.args:
        case [ast.Starred() | ast.GeneratorExp() | ast.Constant(), *_]:
            return
        case [first, *others] if not others or called in KEEPS_THE_SHAPE:
            yield place.replaced(node, place.text(first))
        case _:
            return


def _called(place: EditSite, call: ast.Call, argument: str) -> str:
    return f"{place.text(call.func)}({argument})"


def keyword_left_out(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """An option was copied from another place, or means something else than was thought."""
    for keyword in node.keywords:
        if keyword.arg is not None:
            yield _without(keyword, node, place)


def keyword_added(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """The default of an option is not what people expect."""
    added = SURPRISING_DEFAULTS.get(place.called_name(node))
    if added is None or any(one.arg == added.split("=")[0] for one in node.keywords):
        return
    end = place.source.span(node)[1] - 1
    has_arguments = bool(node.args or node.keywords)
    yield Change(end, end, f", {added}" if has_arguments else added)


def argument_left_out(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """An argument was given that the function should choose by itself."""
    for argument in node.args[1:]:
        yield _without(argument, node, place)


def _without(argument: ast.expr | ast.keyword, call: ast.Call, place: EditSite) -> Change:
    """The call without an argument, and without one of the commas next to it."""
    start, end = place.source.span(argument)
    before = place.source.raw[:start]
    if before.rstrip(b" ").endswith(b","):
        return Change(len(before.rstrip(b" ")) - 1, end, "")
    last = place.source.span(call)[1] - 1
    after = place.source.between(end, last)
    spaces = len(after) - len(after.lstrip(" "))
    if after.lstrip(" ").startswith(","):
        rest = after.lstrip(" ")[1:]
        end += spaces + 1 + len(rest) - len(rest.lstrip(" "))
    return Change(start, end, "")


def arguments_swapped(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """Two arguments of the same type were given in the wrong order."""
    for one, other in zip(node.args, node.args[1:], strict=False):
        if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred):
            start, first_end = place.source.span(one)
            second_start, end = place.source.span(other)
            middle = place.source.between(first_end, second_start)
            yield Change(start, end, f"{place.text(other)}{middle}{place.text(one)}")


# Edits that add what was forgotten: an optional argument, the dot behind a prefix, a mask.

MOST_MASKS = 4
"""So many masks are tried for an expression."""


def optional_argument(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """A function of the file has an option that this call needs, and it was not given."""
    # A truth value is given as the other one, and what is None by default as the local name that
    # is called like the parameter.
    function = _function(place.called_name(node), place)
    if function is None or any(one.arg is None for one in node.keywords):
        return
    end = place.source.span(node)[1] - 1
    before = ", " if node.args or node.keywords else ""
    given = {one.arg for one in node.keywords}
    for name, default in _options(function, len(node.args)):
        if name in given or not isinstance(default, ast.Constant):
            continue
        if isinstance(default.value, bool):
            yield Change(end, end, f"{before}{name}={not default.value}")
        elif default.value is None and name in place.scope.names:
            yield Change(end, end, f"{before}{name}={name}")


def _function(name: str, place: EditSite) -> ast.FunctionDef | None:
    """The only function or method of the file with this name, or the ``__init__`` of a class."""
    found = [
        one
        for one in ast.walk(place.source.tree)
        if isinstance(one, ast.FunctionDef) and one.name == name and name
    ]
    for one in place.source.tree.body:
        if isinstance(one, ast.ClassDef) and one.name == name:
            found += [
                method
                for method in one.body
                if isinstance(method, ast.FunctionDef) and method.name == "__init__"
            ]
    return found[0] if len(found) == 1 else None


def _options(function: ast.FunctionDef, positional: int) -> Iterator[tuple[str, ast.expr]]:
    """The parameters with defaults that so many positional arguments do not reach."""
    arguments = function.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    skipped = 1 if names[:1] in (["self"], ["cls"]) else 0
    defaults = zip(names[len(names) - len(arguments.defaults) :], arguments.defaults, strict=True)
    for name, default in defaults:
        if names.index(name) - skipped >= positional:
            yield name, default
    for one, other in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if other is not None:
            yield one.arg, other


def dot_behind_a_prefix(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """``layers.1`` is also the beginning of ``layers.10``, and ``item`` that of ``item_text``."""
    match node:
        case ast.Call(func=ast.Attribute(attr="startswith"), args=[prefix], keywords=[]):
            text = place.text(prefix)
            match prefix:
                case ast.Constant(value=str(value)):
                    yield place.replaced(prefix, repr(f"{value}."))
                case ast.Tuple(elts=parts):
                    words = [one.value for one in parts if isinstance(one, ast.Constant)]
                    dotted = tuple(f"{word}." for word in words if isinstance(word, str))
                    if len(dotted) == len(parts):
                        yield place.replaced(prefix, repr(dotted))
                case _:
                    yield place.replaced(prefix, f'f"{{{text}}}."' if '"' not in text else text)
                    yield place.replaced(prefix, f'tuple(f"{{one}}." for one in {text})')


def masked_too(node: ast.expr, place: EditSite) -> Iterator[Change]:
    """Several masks say what counts, and one of them was forgotten."""
    # The other one is an attribute of the same object, or a name of the same shape.
    if not isinstance(place.parent(node), ast.Assign | ast.Subscript | ast.BinOp):
        return
    if isinstance(node, ast.Attribute) and not place.is_called(node):
        owner = place.text(node.value)
        if owner == "self" or owner in place.facts.modules:
            return
        others = place.facts.attributes.get(place.facts.owner(node.value), [])
        for other in [one for one in others if one != node.attr][:MOST_MASKS]:
            yield place.replaced(node, f"{place.text(node)} & {owner}.{other}")
    elif isinstance(node, ast.Name):
        shape = place.scope.description(node.id).removeprefix("tensor ")
        kind, _, sizes = shape.partition(" ")
        masks = [
            name
            for name in place.scope.names_before(node.lineno, node.id)
            if name != node.id and place.scope.description(name) == f"tensor bool {sizes}"
        ]
        for mask in masks[:MOST_MASKS] if sizes else []:
            yield place.replaced(node, f"{node.id} {'&' if kind == 'bool' else '*'} {mask}")


# Edits of numbers of examples: those of this rank, of all ranks, and of what a mask keeps.


def count_of_all(node: ast.BinOp, place: EditSite) -> Iterator[Change]:
    """A sum is divided by the number of this rank's examples, and ranks have different numbers."""
    if not isinstance(node.op, ast.Div):
        return
    for number in _numbers_below(node.right, place):
        total = total_of(place.text(number), node, place, _counted(number, place))
        if total is None:
            continue
        if number is node.right:
            # Who averages over ranks afterwards, as DDP does, divides by their number again.
            world_size = place.world_size()
            if world_size:
                above = joined(place.text(node.left), "*", world_size)
                yield place.replaced(node, joined(above, "/", total))
            if not _is_averaged(node, place):
                yield place.replaced(node.right, total)
        else:
            yield place.replaced(node.right, total)


def _numbers_below(divisor: ast.expr, place: EditSite) -> Iterator[ast.expr]:
    """The number in a divisor: it stands alone, or is multiplied by the world size."""
    match divisor:
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            for number, other in ((left, right), (right, left)):
                if is_count(number) and "world_size" in place.text(other):
                    yield number
        case _ if is_count(divisor):
            yield divisor


def _counted(number: ast.expr, place: EditSite) -> str:
    match number:
        case ast.Call(func=ast.Attribute(value=counted)) | ast.Call(args=[counted]):
            return place.text(counted)
        case ast.Subscript(value=ast.Attribute(value=counted)):
            return place.text(counted)
        case _:
            return ""


def is_count(node: ast.expr) -> bool:
    """True for ``len(x)``, ``x.numel()``, ``x.size(0)`` and ``x.shape[0]``."""
    match node:
        case ast.Call(func=ast.Name(id="len"), args=[_]):
            return True
        case ast.Call(func=ast.Attribute(attr="numel"), args=[]):
            return True
        case ast.Call(func=ast.Attribute(attr="size"), args=[ast.Constant(value=0)]):
            return True
        case ast.Subscript(value=ast.Attribute(attr="shape"), slice=ast.Constant(value=0)):
            return True
        case _:
            return False


def _is_averaged(node: ast.expr, place: EditSite) -> bool:
    parent = place.parent(node)
    return isinstance(parent, ast.Call) and is_mean(parent, place)


def mean_over_all(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """The mean of the ranks' means weighs every rank alike, however many examples it has."""
    match node:
        case ast.Call(func=ast.Attribute(value=values, attr="mean")):
            pass
        case _:
            return
    count = _count_of_mean(node, values, place)
    if count is None or place.text(values).split(".")[0] in place.facts.modules:
        return
    end = place.source.span(values)[1]
    arguments = place.source.between(end, place.source.span(node)[1]).replace(".mean", "", 1)
    summed = f"{place.closed(values)}.sum{arguments.lstrip(' )')}"
    parent = place.parent(node)
    if isinstance(parent, ast.Call) and is_reducer(parent, place):
        match place.parent(parent):
            case ast.BinOp(op=ast.Div()) as mean if mean.left is parent:
                reducer = place.text(parent.func)
                tensor = place.facts.imported_as("torch.tensor")
                if tensor:
                    whole = f"{reducer}({tensor}({count}))"
                    yield place.replaced(mean, joined(f"{reducer}({summed})", "/", whole))
                    return
    elif not _is_reduced_later(node, place):
        return
    total, world_size = total_of(count, node, place), place.world_size()
    if total and world_size:
        yield place.replaced(node, joined(joined(summed, "*", world_size), "/", total))


def _count_of_mean(node: ast.Call, values: ast.expr, place: EditSite) -> str | None:
    dimensions = [*node.args[:1], *(one.value for one in node.keywords if one.arg == "dim")]
    text = place.closed(values)
    match dimensions:
        case []:
            return f"{text}.numel()"
        case [ast.Constant(value=0)]:
            return f"len({place.text(values)})"
        case _:
            return None


def _is_reduced_later(node: ast.Call, place: EditSite) -> bool:
    """True where the mean gets a name, and the function calls a collective."""
    statement = place.source.nearest(node, ast.stmt)
    calls = [one for one in ast.walk(place.scope.function) if isinstance(one, ast.Call)]
    reduced = any(place.called_name(one) == "all_reduce" for one in calls)
    return reduced and isinstance(statement, ast.Assign)


# Edits of what the parts of a batch, or the turns of a loop, count in a mean or a sum.

MOST_FLAGS = 2


def share_of_a_turn(node: ast.expr, place: EditSite) -> Iterator[Change]:
    """A term that is the same in every turn of a loop is added in each of them."""
    match place.parent(node):
        case ast.BinOp(op=ast.Add(), left=left, right=right) if node in (left, right):
            pass
        case ast.Assign(targets=[ast.Name(id=name)]) if _is_added(name, place):
            pass
        case _:
            return
    loop = place.source.nearest(node, ast.For, ast.FunctionDef)
    if isinstance(loop, ast.For) and place.may_be_tensor(node):
        own = {one.id for one in ast.walk(loop.target) if isinstance(one, ast.Name)}
        used = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        lists = [one.id for one in ast.walk(loop.iter) if isinstance(one, ast.Name)]
        of_scope = [one for one in lists if one in place.scope.names]
        if of_scope and not own & used:
            yield place.replaced(node, joined(place.text(node), "/", f"len({of_scope[0]})"))


def _is_added(name: str, place: EditSite) -> bool:
    return any(
        isinstance(one, ast.BinOp)
        and isinstance(one.op, ast.Add)
        and name in (place.text(one.left), place.text(one.right))
        for one in ast.walk(place.scope.function)
    )


def only_if(node: ast.AugAssign, place: EditSite) -> Iterator[Change]:
    """What is only there to keep the ranks in step is counted as well."""
    if not isinstance(node.op, ast.Add):
        return
    flags = [name for name in place.scope.names if place.scope.description(name) == "bool"]
    target, value = place.text(node.target), place.text(node.value)
    for flag in flags[:MOST_FLAGS]:
        yield place.rewritten(node, f"{target} += 0 if {flag} else {value}")
        yield place.rewritten(node, f"{target} += {value} if {flag} else 0")


# Edits of how rows are dealt to ranks, and of how the parts of ranks are put together.

# As many matrices are stacked: those of queries, keys and values, or of a gate and what it opens.
STACKED = (3, 2)


def parts_joined(node: ast.Call, place: EditSite) -> Iterator[Change]:
    """Rows that were dealt in turn are put together one rank after the other, or the reverse."""
    match node:
        case ast.Call(func=ast.Attribute(attr="cat" | "concat"), args=[parts, *rest]):
            axis = _axis(rest, node.keywords)
            stack = place.facts.imported_as("torch.stack")
            if stack is not None and axis is not None and not _is_display(parts):
                stacked = f"{stack}({place.text(parts)}, {axis + 1})"
                yield place.replaced(node, f"{stacked}.flatten({axis}, {axis + 1})")
        case ast.Call(
            func=ast.Attribute(
                attr="flatten",
                value=ast.Call(func=ast.Attribute(attr="stack"), args=[parts, *rest]) as stacked,
            )
        ):
            axis = _axis(rest, stacked.keywords)
            cat = place.facts.imported_as("torch.cat")
            if cat is not None and axis is not None and axis > 0:
                last = f", {axis - 1}" if axis > 1 else ""
                yield place.replaced(node, f"{cat}({place.text(parts)}{last})")
        case _:
            return


def _is_display(node: ast.expr) -> bool:
    """True for a list that is written out: its members are no parts of ranks."""
    return isinstance(node, ast.List | ast.Tuple)


def _axis(arguments: list[ast.expr], keywords: list[ast.keyword]) -> int | None:
    given = [*arguments, *(one.value for one in keywords if one.arg == "dim")]
    match given:
        case []:
            return 0
        case [ast.Constant(value=int(axis))]:
            return axis
        case _:
            return None


def part_of_each(node: ast.Subscript, place: EditSite) -> Iterator[Change]:
    """A weight holds several matrices, and a rank needs its part of each of them."""
    match node:
        case ast.Subscript(
            value=ast.Call(func=ast.Attribute(value=whole, attr="chunk"), args=[n]), slice=r
        ) if isinstance(r, ast.Name | ast.Attribute | ast.Call):
            for matrices in STACKED:
                sizes = f"(0, ({matrices}, {place.text(n)}, -1))"
                split = f"{place.closed(whole)}.unflatten{sizes}"
                yield place.replaced(node, f"{split}[:, {place.text(r)}].flatten(0, 1)")
        case _:
            return
