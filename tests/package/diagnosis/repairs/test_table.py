"""The edits of every mistake in the table are made where they can repair something."""

from __future__ import annotations

import pytest

from ddp_equivalence.diagnosis.repairs.patterns import CHOICES
from ddp_equivalence.diagnosis.repairs.table import MISTAKES
from tests.package.diagnosis.repairs.edited import HEAD, body, sources, written

IN_A_FUNCTION = (
    ("k = x.startswith('item')", "k = x.startswith('item' + '.')"),
    ("g(x, keep=True)", "g(x, keep=False)"),
    ("k = x[:y]", "k = x[-y:]"),
    ("x[..., :y] += part", "x[..., -y:] += part"),
    ("k = x[y + 1:]", "k = x[:-(y + 1)]"),
    ("k = x[-y:]", "k = x[:y]"),
    ("x /= rank.local_world_size", "x /= rank.world_size / rank.nodes"),
    ("x.div_(y)", "x.div_(dist.get_world_size())"),
    ("for p in part:\n    k = p / y", "for p in part:\n    k = p / len(part)"),
    ("k = x.sum()", "k = x.sum(); dist.all_reduce(k)"),
    ("k = x.sum()", "k = x.sum(); dist.all_reduce(k); k /= dist.get_world_size()"),
    ("k = (x + 1) // y", "k = -(-(x + 1) // y)"),
    ("for i in x:\n    return", "for i in x:\n    continue"),
    ("for i in x:\n    continue", "for i in x:\n    break"),
    ("if x:\n    return\nx.g()", "if x:\n    pass\nx.g()"),
    ("with x.no_sync():\n    g()", "if True:\n    g()"),
    ("k = x[order]", "k = x[order.argsort()]"),
    ("k = x['LOCAL_RANK']", "k = x['RANK']"),
    ("k = x.sum()", "k = x.mean()"),
    ("k = list(x)", "k = sorted(x)"),
    ("g(model.parameters())", "g(model.state_dict().values())"),
    ("x[order] = y", "x[order] += y"),
    ("x += y", "x = y"),
    ("x[order] += y", "x.index_add_(0, order, y)"),
    ("k = x < y", "k = x <= y"),
    ("k = x in y", "k = x not in y"),
    ("k = x // y == 1", "k = x % y == 1"),
    ("k = x * (y + 1)", "k = x / (y + 1)"),
    ("x.clip()\ny.average()", "y.average()\nx.clip()"),
    ("if x:\n    y.g()\nx.g()", "x.g()\nif x:\n    y.g()"),
    ("g(group=y, op=x)", "g(op=x)"),
    ("g(x)", "x = g(x)"),
    ("x.div(2)", "x = x.div(2)"),
    ("mean = x.g()\nk = x - x.mean(0)", "mean = x.g()\nk = x - mean"),
    ("k = x and y == 0", "k = x"),
    ("k = x and y", "k = x or y"),
    ("if x is None:\n    y.g()", "if not x is None:\n    y.g()"),
    ("while x:\n    y.g()", "while True:\n    y.g()"),
    ("k = x * (y + 1)", "k = x * y + 1"),
    ("k = x - y / part", "k = (x - y) / part"),
    ("k = (x + y).float() * 2", "k = (x + y) * 2"),
    ("k = torch.clamp(x, min=1)", "k = x"),
    ("k = (x + y) * 2", "k = x * 2"),
    ("if x:\n    y.g()\ny.h()", "pass\ny.h()"),
    ("(x + y).backward()", "((x + y) / dist.get_world_size()).backward()"),
    ("k = x - y", "k = x - y * dist.get_world_size()"),
    ("k = x.mean(0)", "k = x.mean(-1)"),
    ("k = 0.9 * x", "k = 0.1 * x"),
    ("k = x[y:part]", "k = x[y + 1:part]"),
    ("k = x[:, ::2]", "k = x[:, :]"),
    ("k = x['a'] != -100", "k = x['a'][:, 1:] != -100"),
    ("k = x[1:]", "k = x"),
    ("k = part * 2", "k = x * 2"),
    ("k = x[y]", "k = x[y + 1]"),
    ("k = x[y.shape]", "k = x[y]"),
    ("k = not x", "k = x"),
    ("for i in range(1, y):\n    x.g(i)", "for i in range(1, y - 1):\n    x.g(i)"),
    ("k = x * y", "k = (x * y).detach()"),
)

TRAINER = """\
class Trainer:
    def __init__(self, model, ema, near, far, count):
        self.model, self.ema, self.near, self.far, self.count = model, ema, near, far, count
    def averaged(self, value):
        return value / self.count
    def total(self, value):
        return value * self.count
    def run(self, x):
        a = self.averaged(x), self.total(x)
        {}
"""

BACKWARD = """\
class Same(torch.autograd.Function):
    @staticmethod
    def backward(ctx, *grads):
        {}
"""

IN_A_FILE = (
    (BACKWARD, "return ctx.a, None", "return grads[0] * ctx.a, None"),
    (TRAINER, "g(self.near)", "g(self.far)"),
)


@pytest.mark.parametrize(("before", "after"), IN_A_FUNCTION)
def test_an_edit_is_made_in_a_function(before: str, after: str) -> None:
    assert written(body(after)) in sources(body(before))


@pytest.mark.parametrize(("around", "before", "after"), IN_A_FILE)
def test_an_edit_is_made_in_a_file(around: str, before: str, after: str) -> None:
    assert written(HEAD + around.format(after)) in sources(HEAD + around.format(before))


def test_the_edits_of_every_mistake_are_made_here() -> None:
    files = [body(before) for before, _ in IN_A_FUNCTION]
    files += [HEAD + around.format(before) for around, before, _ in IN_A_FILE]
    made = {edit.place for file in files for edit in sources(file).values()}
    assert [one.why for place, one in enumerate(MISTAKES) if place not in made] == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.why)
def test_every_hole_of_a_replacement_can_be_filled(mistake: object) -> None:
    assert all(pattern.choices <= CHOICES.keys() for pattern in mistake.patterns)  # type: ignore[attr-defined]
