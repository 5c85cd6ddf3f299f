"""The explanations that are considered, in the order in which equally good ones are believed."""

from __future__ import annotations

from ddp_equivalence.diagnoses import (
    averaged_twice,
    batch_norm,
    dropout,
    mean_not_sum,
    mean_of_node_means,
    no_all_reduce,
    sum_not_mean,
    weighted_equally,
)
from ddp_equivalence.diagnoses.hypothesis import Hypothesis

HYPOTHESES: tuple[Hypothesis, ...] = (
    batch_norm.HYPOTHESIS,
    dropout.HYPOTHESIS,
    mean_not_sum.HYPOTHESIS,
    sum_not_mean.HYPOTHESIS,
    no_all_reduce.HYPOTHESIS,
    weighted_equally.SHARDS,
    weighted_equally.TOKENS,
    mean_of_node_means.HYPOTHESIS,
    averaged_twice.HYPOTHESIS,
)
