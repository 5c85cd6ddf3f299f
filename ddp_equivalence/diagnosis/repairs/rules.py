"""All kinds of edits, those first of which fewest had to be made for each step that they repaired.

The order was found on 200 faulty steps whose faulty line is known (`tests/faulty_steps`). All edits
of this line were run. For each kind, the number of steps that it repaired there, where a step that
several kinds repair counts half for each of them and half in shares, was divided by the number of
edits of this kind that all lines of a step have. Both were moved a little towards what an unknown
kind is expected to have (0.3 repairs in 200 steps, and 0.15 edits in a step), so that one lucky
repair decides little. In the order below the ratio falls from 20 to 0.

Kinds that repaired none of the 240 steps, once an edit had to hold on another layout as well, or
none that another kind does not repair too, were taken out on 2026-11-27, but for those that change
any code, as in mutation testing: operators, conditions, slices, arguments, results.

To add a kind: write a function that proposes changes for a type of node, in the file of its topic,
and put it into this table. Its docstring says why people make the mistake.
"""

from __future__ import annotations

import ast
from typing import Any

from ddp_equivalence.case.edit import EditKind
from ddp_equivalence.diagnosis.repairs import (
    after_reduction,
    axes,
    blocks,
    calls,
    constants,
    counts,
    forgotten,
    indices,
    micro_batches,
    names,
    operators,
    order_of_parts,
    passes,
    statements,
    wraps,
)
from ddp_equivalence.diagnosis.repairs.change import Rule

RULES: tuple[Rule[Any], ...] = (
    Rule(EditKind.AFTER_REDUCTION, ast.Call, after_reduction.addend_outside),
    Rule(EditKind.AFTER_REDUCTION, ast.Assign, after_reduction.addend_after),
    Rule(EditKind.AFTER_REDUCTION, ast.Assign, after_reduction.limited_after),
    Rule(EditKind.VARIANCE_OF_ALL, ast.Call, after_reduction.around_mean_of_all),
    Rule(EditKind.ROUNDED_UP, ast.BinOp, operators.rounded_up),
    Rule(EditKind.DOT_ADDED, ast.Call, forgotten.dot_behind_a_prefix),
    Rule(EditKind.OPTION_GIVEN, ast.Call, forgotten.optional_argument),
    Rule(EditKind.TIMES_ARGUMENT, ast.expr, wraps.times_an_argument),
    Rule(EditKind.JUMP, ast.stmt, statements.jump),
    Rule(EditKind.BOTH_BOUNDS, ast.Compare, axes.both_bounds),
    Rule(EditKind.BEFORE_SKIPPED, ast.Continue, passes.before_skipped),
    Rule(EditKind.MEAN_OF_ALL, ast.Call, counts.mean_over_all),
    Rule(EditKind.ONLY_THESE, ast.Expr, passes.only_these_parameters),
    Rule(EditKind.HOOKS, ast.Expr, passes.hooks_replaced),
    Rule(EditKind.REQUIRES_GRAD, ast.Call, wraps.requires_grad),
    Rule(EditKind.SHARE_OF_A_TURN, ast.expr, micro_batches.share_of_a_turn),
    Rule(EditKind.ORDER_OF_PARTS, ast.Call, order_of_parts.parts_joined),
    Rule(EditKind.ORDER_OF_PARTS, ast.Subscript, order_of_parts.part_of_each),
    Rule(EditKind.OFFSET, ast.Call, wraps.offset_of_the_rank),
    Rule(EditKind.OFFSET, ast.expr, wraps.rank_times_count),
    Rule(EditKind.OFFSET, ast.Call, wraps.diagonal_of_the_rank),
    Rule(EditKind.OFFSET, ast.Call, wraps.counted_from_the_rank),
    Rule(EditKind.CONTEXT_LEFT_OUT, ast.With, blocks.context_left_out),
    Rule(EditKind.CONDITION, ast.BoolOp, operators.and_or),
    Rule(EditKind.CONDITION, ast.stmt, blocks.condition_of_block),
    Rule(EditKind.LISTS_JOINED, ast.For, blocks.other_list_too),
    Rule(EditKind.CONDITION_LEFT_OUT, ast.BoolOp, operators.condition_left_out),
    Rule(EditKind.INDEX, ast.Subscript, indices.index_off_by_one),
    Rule(EditKind.AXES, ast.Call, axes.sizes_swapped),
    Rule(EditKind.COMPARISON, ast.Compare, operators.another_comparison),
    Rule(EditKind.PERMUTATION_INVERTED, ast.Subscript, indices.permutation_inverted),
    Rule(EditKind.MIRRORED, ast.Slice, axes.mirrored),
    Rule(EditKind.METHOD, ast.Attribute, calls.mixed_up),
    Rule(EditKind.METHOD, ast.Name, calls.mixed_up_name),
    Rule(EditKind.METHOD, ast.Call, calls.function_for_method),
    Rule(EditKind.TENSORS_OF_MODULE, ast.Call, calls.tensors_of_a_module),
    Rule(EditKind.WITH_GRADIENT, ast.Expr, statements.reduced_with_gradient),
    Rule(EditKind.IN_PLACE, ast.Attribute, calls.in_place),
    Rule(EditKind.ADDED_UP, ast.Assign, statements.added_up),
    Rule(EditKind.ADDED_UP, ast.AugAssign, statements.assigned),
    Rule(EditKind.ADDED_UP, ast.AugAssign, statements.equal_indices_added),
    Rule(EditKind.DIVISOR, ast.expr, wraps.another_divisor),
    Rule(EditKind.PARENTHESES, ast.BinOp, operators.parentheses_moved),
    Rule(EditKind.ONLY_IF, ast.AugAssign, micro_batches.only_if),
    Rule(EditKind.FLAG, ast.Constant, constants.the_other_truth_value),
    Rule(EditKind.MOVED_OUT, ast.stmt, blocks.moved_out),
    Rule(EditKind.OPERATOR, ast.BinOp, operators.another_operator),
    Rule(EditKind.CALL_BY_NAME, ast.Call, names.name_for_call),
    Rule(EditKind.RANGE, ast.Call, indices.range_off_by_one),
    Rule(EditKind.OWN_ATTRIBUTE, ast.Attribute, names.another_attribute),
    Rule(EditKind.MASKED_TOO, ast.expr, forgotten.masked_too),
    Rule(EditKind.SLICE, ast.Slice, indices.another_slice),
    Rule(EditKind.SLICE, ast.Compare, indices.shifted_too),
    Rule(EditKind.SLICE, ast.Call, indices.shifted_call),
    Rule(EditKind.STATEMENT_LEFT_OUT, ast.stmt, statements.left_out),
    Rule(EditKind.ATTRIBUTE_LEFT_OUT, ast.Attribute, names.attribute_left_out),
    Rule(EditKind.COUNT_OF_ALL, ast.BinOp, counts.count_of_all),
    Rule(EditKind.KEYWORD_LEFT_OUT, ast.Call, calls.keyword_left_out),
    Rule(EditKind.STATEMENTS_SWAPPED, ast.stmt, blocks.swapped),
    Rule(EditKind.CALL_LEFT_OUT, ast.Call, calls.call_left_out),
    Rule(EditKind.OPERAND_LEFT_OUT, ast.BinOp, operators.operand_left_out),
    Rule(EditKind.KEYWORD_ADDED, ast.Call, calls.keyword_added),
    Rule(EditKind.FUNCTION_APPLIED, ast.expr, wraps.function_applied),
    Rule(EditKind.FUNCTION_APPLIED, ast.Call, wraps.function_applied_to_all),
    Rule(EditKind.SUBSCRIPT_LEFT_OUT, ast.Subscript, indices.subscript_left_out),
    Rule(EditKind.STRING, ast.Constant, constants.another_string),
    Rule(EditKind.REDUCED, ast.stmt, statements.reduced),
    Rule(EditKind.NAME, ast.Name, names.another_name),
    Rule(EditKind.CLONED, ast.expr, wraps.cloned),
    Rule(EditKind.RESULT_USED, ast.Expr, statements.result_used),
    Rule(EditKind.RESULT_USED, ast.stmt, statements.returned),
    Rule(EditKind.OPERANDS_SWAPPED, ast.BinOp, operators.operands_swapped),
    Rule(EditKind.TIMES_WORLD_SIZE, ast.expr, wraps.multiplied_by_world_size),
    Rule(EditKind.SIGN, ast.UnaryOp, operators.sign_left_out),
    Rule(EditKind.OVER_WORLD_SIZE, ast.expr, wraps.divided_by_world_size),
    Rule(EditKind.CONSTANT, ast.Constant, constants.another_number),
    Rule(EditKind.ARGUMENTS_SWAPPED, ast.Call, calls.arguments_swapped),
    Rule(EditKind.ARGUMENT_LEFT_OUT, ast.Call, calls.argument_left_out),
    Rule(EditKind.DETACHED, ast.expr, wraps.detached),
)

LIKELINESS = {kind: number for number, kind in enumerate(dict.fromkeys(one.kind for one in RULES))}
"""The place of each kind of edit, the most likely first."""
