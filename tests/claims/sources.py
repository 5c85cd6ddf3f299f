"""Where people say what the claims say: read in public copies on 2026-11-27.

A source that denies a claim is the answer that it got there. Where nobody was found to say it in
these words, the nearest source is named and marked "near".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GITHUB = "https://github.com"
LIGHTNING = (
    "https://lightning.ai/forums/t/effective-learning-rate-and-batch-size-with-lightning-in-ddp"
)
FORUM = "https://discuss.pytorch.org/t"
TORCH = f"{GITHUB}/pytorch/pytorch"
SANDBOX = f"{GITHUB}/KnurpsBram/pytorch_dataparallel_sandbox"


@dataclass(frozen=True)
class Source:
    """``where``: what the link is called, with who says it. ``does``: what the source does."""

    does: Literal["says", "asks", "denies", "near"]
    where: str
    url: str


def issue(does: Literal["says", "asks", "denies", "near"], name: str, who: str = "") -> Source:
    """An issue or pull request on GitHub: ``owner/name#12``."""
    repository, _, number = name.partition("#")
    text = f"{who}, {repository.partition('/')[2]} {number}" if who else name
    return Source(does, text, f"{GITHUB}/{repository}/issues/{number}")


SAME_RATE = Source(
    "denies",
    "torch's documentation of DDP, note",
    f"{TORCH}/blob/main/torch/nn/parallel/distributed.py",
)
README = "the sandbox's README"

SOURCES: Mapping[str, tuple[Source, ...]] = {
    "test_data_parallel_adds_up_and_ddp_averages": (
        Source("asks", "PyTorch forum 39049", f"{FORUM}/39049"),
    ),
    "test_the_average_is_no_smaller_than_the_sum": (
        Source("says", "Lightning forum 101, post 15", f"{LIGHTNING}/101/15"),
        SAME_RATE,
    ),
    "test_the_gradient_does_not_grow_with_the_processes": (
        issue("says", "ultralytics/ultralytics#18616", "wcyjerry"),
        Source("says", "Lightning forum 101, post 10", f"{LIGHTNING}/101/10"),
    ),
    "test_a_communication_hook_adds_up": (
        issue("says", "pytorch/pytorch#37359", "mrshenli (2020)"),
        issue("denies", "pytorch/pytorch#37002", "SciPioneer (2021)"),
    ),
    "test_the_sum_is_too_large_only_for_added_losses": (
        issue("asks", "tensorpack/tensorpack#1419", "iamhankai"),
    ),
    "test_sum_inside_and_average_between_is_the_big_batch": (
        issue("says", "pytorch/pytorch#36516", "mrshenli (of DDP with several devices)"),
    ),
    "test_uneven_machines_are_not_the_big_batch": (
        issue("near", "pytorch/pytorch#67253", "maxwellzh"),
    ),
    "test_two_machines_train_as_one_with_data_parallel": (
        issue("near", "Lightning-AI/pytorch-lightning#6789", "mees"),
    ),
    "test_equal_gradients_can_train_worse": (
        Source("near", "PyTorch forum 159699", f"{FORUM}/159699"),
    ),
    "test_half_the_batch_per_process_keeps_the_learning_rate": (
        issue("asks", "WZMIAOMIAO/deep-learning-for-image-processing#712", "davidpengiupui"),
        SAME_RATE,
    ),
    "test_a_sum_over_processes_needs_the_learning_rate_divided": (
        issue("says", "pytorch/examples#659", "soumith"),
    ),
    "test_a_quarter_of_the_rate_on_four_processes_is_too_small": (
        issue("near", "facebookresearch/detectron2#934", "rakhimovv"),
    ),
    "test_the_mean_of_two_losses_is_the_big_batch": (
        issue("says", "texttron/tevatron#143", "rgdyy"),
    ),
    "test_equal_batch_sizes_are_not_equal_token_counts": (
        issue("denies", "huggingface/transformers#34242", "sbwww"),
    ),
    "test_a_sum_times_the_world_size_is_the_big_batch": (
        issue("says", "facebookresearch/fairseq#494", "myleott"),
    ),
    "test_only_a_sum_is_multiplied_by_the_world_size": (
        issue("says", "ultralytics/ultralytics#18616", "glenn-jocher"),
        issue("denies", "neuralmagic/sparseml#135", "eldarkurtic"),
    ),
    "test_the_batch_size_of_a_loader_is_that_of_its_process": (
        issue("asks", "s3prl/s3prl#247", "ajd12342"),
    ),
    "test_batch_128_on_four_processes_is_512": (
        issue("asks", "SHI-Labs/Compact-Transformers#64", "imhgchoi"),
    ),
    "test_other_numbers_of_processes_see_the_same_batches": (
        issue("near", "pytorch/pytorch#14329", "lliimsft"),
    ),
    "test_accumulation_multiplies_the_effective_batch": (
        Source(
            "says",
            "Lightning's documentation",
            "https://lightning.ai/docs/pytorch/stable/common/gradient_accumulation.html",
        ),
    ),
    "test_no_sync_only_saves_all_reduces": (
        issue("says", "pytorch/pytorch#43201", "MagicFrogSJTU"),
    ),
    "test_a_thousand_examples_by_32_on_two_processes_are_16_steps": (
        issue("near", "Lightning-AI/pytorch-lightning#13389", "xyangk"),
    ),
    "test_the_two_drop_last_drop_different_things": (
        issue("denies", "areal-project/AReaL#665", "dhh1995"),
    ),
    "test_a_sampler_reads_every_example_once": (
        issue("says", "EleutherAI/oslo#60", "dongsungkim"),
        issue("denies", "pytorch/pytorch#41171", "rohan-varma"),
    ),
    "test_ddp_does_not_share_out_the_data": (
        Source("asks", "PyTorch forum 78440", f"{FORUM}/78440"),
    ),
    "test_a_sampler_shuffles_anew_with_set_epoch": (
        Source(
            "says",
            "torch's documentation of DistributedSampler",
            f"{TORCH}/blob/main/torch/utils/data/distributed.py",
        ),
    ),
    "test_under_join_a_step_is_the_big_batch_of_what_is_left": (
        Source(
            "says",
            "torch's documentation of DDP.join",
            f"{TORCH}/blob/main/torch/nn/parallel/distributed.py",
        ),
    ),
    "test_under_join_every_example_weighs_the_same": (
        Source(
            "says",
            "torch's documentation of DDP.join",
            f"{TORCH}/blob/main/torch/nn/parallel/distributed.py",
        ),
    ),
    "test_linear_scaling_reaches_the_same_weight": (
        Source("says", README, SANDBOX),
        issue("says", "Lightning-AI/pytorch-lightning#4878", "floboc"),
    ),
    "test_linear_scaling_is_approximate_where_the_gradient_changes": (
        issue("near", "horovod/horovod#930", "tgaddair"),
        Source("denies", README, SANDBOX),
    ),
    "test_square_root_scaling_keeps_the_variance_of_a_step": (
        Source("says", "Lightning forum 101, post 20", f"{LIGHTNING}/101/20"),
        Source("says", README, SANDBOX),
    ),
    "test_more_processes_make_no_larger_updates": (
        issue("near", "horovod/horovod#930", "tgaddair"),
    ),
    "test_more_epochs_are_needed_unless_the_rate_grows_as_much": (Source("says", README, SANDBOX),),
    "test_adam_hides_a_constant_factor": (
        Source("near", "Kingma & Ba 2014, abstract", "https://arxiv.org/abs/1412.6980"),
    ),
    "test_adam_does_not_hide_everything": (issue("near", "zhreshold/mxnet-ssd#191", "indhub"),),
    "test_adams_step_is_not_always_as_long_as_the_learning_rate": (
        Source(
            "near",
            "Kingma & Ba 2014, section 1 (a bound)",
            "https://arxiv.org/abs/1412.6980",
        ),
    ),
    "test_linear_scaling_with_adam": (issue("denies", "horovod/horovod#930", "maxhgerlach"),),
    "test_optimizers_with_a_state_train_like_the_big_batch": (
        issue("near", "pytorch/tutorials#2433", "timgianitsos"),
    ),
    "test_clipping_is_that_of_the_big_batch": (
        issue("says", "huggingface/diffusers#721", "patil-suraj (with the condition)"),
    ),
    "test_init_process_group_starts_no_second_process": (
        issue("asks", "pytorch/pytorch#49846", "MarsSu0618"),
        Source(
            "says",
            "torch/distributed/constants.py (the timeouts)",
            f"{TORCH}/blob/main/torch/distributed/constants.py",
        ),
    ),
    "test_one_process_gives_ddp_one_device": (issue("asks", "pytorch/pytorch#7092", "eriche2016"),),
    "test_device_ids_are_for_gpus_only": (
        Source(
            "near",
            "torch's DDP tutorial",
            "https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html",
        ),
    ),
    "test_the_local_rank_is_not_always_a_remainder": (
        Source(
            "says",
            "torch's DDP tutorial",
            "https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html",
        ),
        issue("denies", "open-mmlab/mmengine#973", "C1rN09"),
    ),
    "test_ddp_keeps_ranks_alike_that_go_on_from_a_checkpoint": (
        issue("says", "pytorch/pytorch#111138", "NcJie"),
    ),
}
"""By the name of the claim's test."""
