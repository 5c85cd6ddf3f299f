"""Kinds of edits that only code for several ranks needs: the code before and after each."""

from __future__ import annotations

from ddp_equivalence.case.edit import EditKind as Kind

IN_A_FUNCTION = (
    (Kind.DOT_ADDED, 'k = x.startswith("item")', "k = x.startswith('item.')"),
    (Kind.DOT_ADDED, 'k = x.startswith(("a", "b"))', "k = x.startswith(('a.', 'b.'))"),
    (Kind.DOT_ADDED, "k = x.startswith(y)", 'k = x.startswith(f"{y}.")'),
    (
        Kind.DOT_ADDED,
        "k = x.startswith(y)",
        'k = x.startswith(tuple(f"{one}." for one in y))',
    ),
    (Kind.MASKED_TOO, "g(part.b)\nk = part.a", "g(part.b)\nk = part.a & part.b"),
    (Kind.FLAG, "g(x, keep=True)", "g(x, keep=False)"),
    (
        Kind.OFFSET,
        "for i, p in enumerate(x): g(i)",
        "for i, p in enumerate(x, (dist.get_rank() if dist.is_initialized() else 0) * len(x)):"
        " g(i)",
    ),
    (
        Kind.OFFSET,
        "k = torch.ones_like(x).fill_diagonal_(0)",
        "k = torch.ones_like(x).fill_diagonal_(0)"
        ".roll((dist.get_rank() if dist.is_initialized() else 0) * len(x), 1)",
    ),
    (Kind.ORDER_OF_PARTS, "k = torch.cat(part)", "k = torch.stack(part, 1).flatten(0, 1)"),
    (Kind.ORDER_OF_PARTS, "k = torch.cat(x, dim=1)", "k = torch.stack(x, 2).flatten(1, 2)"),
    (Kind.ORDER_OF_PARTS, "k = torch.stack(x, 1).flatten(0, 1)", "k = torch.cat(x)"),
    (
        Kind.ORDER_OF_PARTS,
        "k = x.chunk(y)[order]",
        "k = x.unflatten(0, (3, y, -1))[:, order].flatten(0, 1)",
    ),
    (Kind.AXES, "k = x.view(y, 4, -1)", "k = x.view(4, y, -1).transpose(0, 1)"),
    (Kind.AXES, "k = x.view(y, 4, -1)", "k = x.view(y, -1, 4).transpose(1, 2)"),
    (Kind.MIRRORED, "k = x[:y]", "k = x[-y:]"),
    (Kind.MIRRORED, "x[..., :y] += part", "x[..., -y:] += part"),
    (Kind.MIRRORED, "k = x[:2]", "k = x[-2:]"),
    (Kind.MIRRORED, "k = x[y:]", "k = x[:-y]"),
    (Kind.MIRRORED, "k = x[y + 1:]", "k = x[:-(y + 1)]"),
    (Kind.MIRRORED, "k = x[-y:]", "k = x[:y]"),
    (Kind.MIRRORED, "k = x[:-y]", "k = x[y:]"),
    (
        Kind.BOTH_BOUNDS,
        "k = x[order:part]\nj = y < part",
        "k = x[order:part]\nj = (order <= y) & (y < part)",
    ),
    (
        Kind.BOTH_BOUNDS,
        "k = x[order:part]\nj = y >= order",
        "k = x[order:part]\nj = (y >= order) & (y < part)",
    ),
    (
        Kind.COUNT_OF_ALL,
        "k = x / len(y)",
        "k = x * dist.get_world_size() / "
        "(count := torch.tensor(len(y)), dist.all_reduce(count))[0]",
    ),
    (
        Kind.COUNT_OF_ALL,
        "k = x / (y.numel() * dist.get_world_size())",
        "k = x / (count := torch.tensor(y.numel()), dist.all_reduce(count))[0]",
    ),
    (
        Kind.MEAN_OF_ALL,
        "k = x.mean(0)\ndist.all_reduce(k)",
        "k = x.sum(0) * dist.get_world_size() / "
        "(count := torch.tensor(len(x)), dist.all_reduce(count))[0]\ndist.all_reduce(k)",
    ),
    (
        Kind.AFTER_REDUCTION,
        "k = x.sum().clamp(min=1)\nif y:\n    dist.all_reduce(k)\ng(k)",
        "k = x.sum()\nif y:\n    dist.all_reduce(k)\nk = k.clamp(min=1)\ng(k)",
    ),
    (
        Kind.AFTER_REDUCTION,
        "k = x.sum() + 1\ndist.all_reduce(k)",
        "k = x.sum()\ndist.all_reduce(k)\nk = k + 1",
    ),
    (
        Kind.VARIANCE_OF_ALL,
        "mean = g(x)\nk = x.var(dim=0, unbiased=False)",
        "mean = g(x)\nk = x.square().mean(dim=0) - mean.square()",
    ),
    (
        Kind.DIVISOR,
        "x /= rank.local_world_size",
        "x /= (rank.world_size / rank.nodes)",
    ),
    (
        Kind.REDUCED,
        "k = x.sum()\ng(group=y.group)",
        "k = x.sum(); dist.all_reduce(k, group=y.group)\ng(group=y.group)",
    ),
    (
        Kind.ONLY_THESE,
        "k = torch.optim.SGD(x.critic.parameters())\nmodel.critic(y).backward()",
        "k = torch.optim.SGD(x.critic.parameters())\n"
        "model.critic(y).backward(inputs=list(model.critic.parameters()))",
    ),
    (
        Kind.HOOKS,
        "for p in x:\n    p.register_hook(y)",
        "for p in x:\n    p._backward_hooks = None; p.register_hook(y)",
    ),
    (
        Kind.BEFORE_SKIPPED,
        "for p in x:\n    if y:\n        continue\n    n = p.numel()\n    order += n",
        "for p in x:\n    if y:\n        n = p.numel(); order += n; continue\n"
        "    n = p.numel()\n    order += n",
    ),
    (
        Kind.SHARE_OF_A_TURN,
        "for p in part:\n    (g(p) + x).backward()",
        "for p in part:\n    (g(p) + x / len(part)).backward()",
    ),
)

# A file with a function that adds up over ranks.
SUMS = """\
def total(value):
    dist.all_reduce(value)
    return value
def balance(one, other):
    return one / other
def f(x, y):
    k = balance(total(x), 1)
    {}
"""

# Two functions with options.
OPTIONS = """\
def judge(x, *, strict=False, mask=None):
    return x
class Judge:
    def __init__(self, x, fair=True):
        self.x = x
def f(x, mask):
    {}
"""

# The same in a Function whose backward method gets a tuple of gradients.
SAVED = """\
class Same(torch.autograd.Function):
    @staticmethod
    def backward(ctx, *grads):
        {}
"""

IN_A_FILE = (
    (Kind.OPTION_GIVEN, OPTIONS, "k = judge(x)", "k = judge(x, strict=True)"),
    (Kind.OPTION_GIVEN, OPTIONS, "k = judge(x)", "k = judge(x, mask=mask)"),
    (Kind.OPTION_GIVEN, OPTIONS, "k = Judge(x)", "k = Judge(x, fair=False)"),
    (Kind.TIMES_ARGUMENT, SAVED, "return ctx.a, None", "return grads[0] * ctx.a, None"),
    (
        Kind.TIMES_ARGUMENT,
        SAVED,
        "return ctx.saved_tensors",
        "return tuple(grads[0] * one for one in ctx.saved_tensors)",
    ),
    (Kind.COUNT_OF_ALL, SUMS, "k = x / len(y)", "k = x / total(torch.tensor(len(y)))"),
    (
        Kind.MEAN_OF_ALL,
        SUMS,
        "return total(x.mean()) / y",
        "return total(x.sum()) / total(torch.tensor(x.numel()))",
    ),
    (Kind.AFTER_REDUCTION, SUMS, "k = total(x.h() + 1)", "k = total(x.h()) + 1"),
    (
        Kind.AFTER_REDUCTION,
        SUMS,
        "k = total(torch.tensor(x.numel() - 1))",
        "k = total(torch.tensor(x.numel())); k = k - 1",
    ),
    (
        Kind.ONLY_IF,
        """\
def f(number: int, counted: int, is_dummy: bool):
    {}
""",
        "number += counted",
        "number += 0 if is_dummy else counted",
    ),
    (Kind.FUNCTION_APPLIED, SUMS, "k = balance(x, y)", "k = balance(total(x), total(y))"),
)
