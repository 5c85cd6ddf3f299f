"""Compares sources by their syntax, where the same can be written in several ways."""

from __future__ import annotations

import ast


def same_syntax(source: str) -> str:
    """A text that two sources share if they differ only in how the same is written.

    The factors of a product and the terms of a sum have no order, the world size is the same
    wherever it comes from, ``pass`` beside other statements is nothing, and so is ``if True``.
    """
    return ast.dump(_Plain().visit(ast.parse(source)))


class _Plain(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field, block in ast.iter_fields(node):
            if isinstance(block, list) and len(block) > 1:
                setattr(node, field, [one for one in block if not isinstance(one, ast.Pass)])
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        is_read = isinstance(node.ctx, ast.Load)
        return _WORLD_SIZE if node.id == "world_size" and is_read else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return _WORLD_SIZE if node.attr == "world_size" else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        is_world_size = ast.unparse(node) == "dist.get_world_size()"
        return _WORLD_SIZE if is_world_size else self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        always = isinstance(node.test, ast.Constant) and node.test.value is True
        return node.body if always else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if isinstance(node.op, ast.Mult | ast.Div):
            above, below = self._factors(node)
            return ast.Tuple([_sorted(above), _sorted(below)], ast.Load())
        self.generic_visit(node)
        if isinstance(node.op, ast.Add):
            node.left, node.right = sorted((node.left, node.right), key=ast.dump)
        return node

    def _factors(self, node: ast.expr) -> tuple[list[ast.expr], list[ast.expr]]:
        """What stands above and below the line of a fraction."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
            left, right = self._factors(node.left), self._factors(node.right)
            if isinstance(node.op, ast.Div):
                right = right[::-1]
            return left[0] + right[0], left[1] + right[1]
        return [self.visit(node)], []


def _sorted(factors: list[ast.expr]) -> ast.expr:
    return ast.List(sorted(factors, key=ast.dump), ast.Load())


_WORLD_SIZE = ast.Name("the world size", ast.Load())
