"""The strategies that are compared with the big batch. A new one is one file and one line here."""

from __future__ import annotations

from ddp_equivalence.strategies import (
    data_parallel,
    ddp_accumulation,
    ddp_autocast,
    ddp_checkpointed,
    ddp_compiled,
    ddp_gathered,
    ddp_global_mean,
    ddp_join,
    ddp_mean,
    ddp_static_graph,
    ddp_sum,
    ddp_sum_hook,
    emulated_data_parallel,
    fsdp2,
    hsdp,
    hybrid,
    hybrid_data_parallel,
    manual_all_reduce,
    post_local_sgd,
    power_sgd,
    replicate,
    sync_batch_norm,
    tensor_parallel_2d,
    zero,
)
from ddp_equivalence.strategies.strategy import Strategy

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        data_parallel.STRATEGY,
        emulated_data_parallel.WHOLE_LOSS,
        emulated_data_parallel.LOSS_INSIDE,
        ddp_mean.STRATEGY,
        ddp_sum.STRATEGY,
        ddp_sum_hook.STRATEGY,
        ddp_global_mean.STRATEGY,
        ddp_gathered.STRATEGY,
        ddp_accumulation.STRATEGY,
        manual_all_reduce.MEAN,
        manual_all_reduce.SUM,
        ddp_static_graph.STRATEGY,
        ddp_checkpointed.STRATEGY,
        ddp_autocast.STRATEGY,
        ddp_compiled.STRATEGY,
        power_sgd.STRATEGY,
        sync_batch_norm.STRATEGY,
        replicate.STRATEGY,
        fsdp2.STRATEGY,
        hsdp.STRATEGY,
        tensor_parallel_2d.STRATEGY,
        zero.STRATEGY,
        ddp_join.STRATEGY,
        post_local_sgd.STRATEGY,
        hybrid.STRATEGY,
        hybrid_data_parallel.STRATEGY,
    )
}
