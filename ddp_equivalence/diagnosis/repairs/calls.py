"""Edits of calls: what is called, whether it is called, and with which arguments."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place

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


def mixed_up(node: ast.Attribute, place: Place) -> Iterator[Change]:
    """Two functions of torch have names or purposes that are easily mixed up."""
    for other in _others(node.attr):
        yield place.renamed(node, other)


def mixed_up_name(node: ast.Name, place: Place) -> Iterator[Change]:
    """Two functions have names or purposes that are easily mixed up."""
    if place.is_called(node) and node.id not in place.scope.names:
        for other in _others(node.id):
            if hasattr(builtins, other) or other in place.facts.modules:
                yield place.replaced(node, other)


def _others(name: str) -> list[str]:
    found = [other for group in MIXED_UP if name in group for other in group if other != name]
    return list(dict.fromkeys(found))


def function_for_method(node: ast.Call, place: Place) -> Iterator[Change]:
    """A statistic is that of one rank, although the file has a function for that of all ranks."""
    if isinstance(node.func, ast.Attribute) and not node.args and not node.keywords:
        for function, takes in place.facts.functions_at(node).items():
            words = function.rsplit(".", 1)[-1].split("_")
            if takes == 1 and node.func.attr in words:
                yield place.replaced(node, f"{function}({place.text(node.func.value)})")


def tensors_of_a_module(node: ast.Call, place: Place) -> Iterator[Change]:
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


def in_place(node: ast.Attribute, place: Place) -> Iterator[Change]:
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


def call_left_out(node: ast.Call, place: Place) -> Iterator[Change]:
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


def _called(place: Place, call: ast.Call, argument: str) -> str:
    return f"{place.text(call.func)}({argument})"


def keyword_left_out(node: ast.Call, place: Place) -> Iterator[Change]:
    """An option was copied from another place, or means something else than was thought."""
    for keyword in node.keywords:
        if keyword.arg is not None:
            yield _without(keyword, node, place)


def keyword_added(node: ast.Call, place: Place) -> Iterator[Change]:
    """The default of an option is not what people expect."""
    added = SURPRISING_DEFAULTS.get(place.called_name(node))
    if added is None or any(one.arg == added.split("=")[0] for one in node.keywords):
        return
    end = place.source.span(node)[1] - 1
    has_arguments = bool(node.args or node.keywords)
    yield Change(end, end, f", {added}" if has_arguments else added)


def argument_left_out(node: ast.Call, place: Place) -> Iterator[Change]:
    """An argument was given that the function should choose by itself."""
    for argument in node.args[1:]:
        yield _without(argument, node, place)


def _without(argument: ast.expr | ast.keyword, call: ast.Call, place: Place) -> Change:
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


def arguments_swapped(node: ast.Call, place: Place) -> Iterator[Change]:
    """Two arguments of the same type were given in the wrong order."""
    for one, other in zip(node.args, node.args[1:], strict=False):
        if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred):
            start, first_end = place.source.span(one)
            second_start, end = place.source.span(other)
            middle = place.source.between(first_end, second_start)
            yield Change(start, end, f"{place.text(other)}{middle}{place.text(one)}")
