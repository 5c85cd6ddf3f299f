"""What is red, yellow or information between two records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence.gate.finding import KINDS, LEVELS
from ddp_equivalence.gate.judge import Policy, judge
from ddp_equivalence.gate.outputs import report
from ddp_equivalence.gate.record import Recorded, RecordedTest
from tests.package.gate.records import DEFAULTS, TESTS, TODAY, found, judged, read, write

SUITE, OTHER, MINE = TESTS
EMPTY: dict[str, Any] = {}
BUCKET = next(iter(DEFAULTS))


def test_the_same_run_twice_is_green(tmp_path: Path) -> None:
    judgement = judged(write(tmp_path / "old"), write(tmp_path / "new"))
    assert (found(judgement), judgement.level, judgement.compared) == ([], "information", 3)


@pytest.mark.parametrize(
    ("changed", "level", "kind", "of"),
    [
        ({"checks": {MINE: {"outcome": "different", "cause": "sum_not_mean", "error": 1.0}}},
         "red", "verdict_worse", MINE),
        ({"checks": {SUITE: {"outcome": "unknown", "error": None}}}, "red", "verdict_worse", SUITE),
        ({"tests": {OTHER: {"outcome": "failed", "reason": "ValueError: no"}}},
         "red", "test_failed", OTHER),
        ({"tests": {OTHER: {"outcome": "skipped", "reason": "needs a GPU"}}},
         "red", "stopped_running", OTHER),
        ({"tests": {OTHER: None}}, "red", "vanished", OTHER),
        ({"ends": False}, "red", "incomplete", "new"),
        ({"checks": {SUITE: {"error": 3e-15}}}, "red", "error_grew", SUITE),
        ({"checks": {SUITE: {"limit": 2e-13}}}, "red", "limit_grew", SUITE),
        ({"defaults": {BUCKET: "50"}}, "red", "default_changed", BUCKET),
        ({"tests": {MINE: {"seconds": 12.0}}}, "yellow", "waits_longer", MINE),
        ({"checks": {SUITE: {"limit": None}}}, "red", "compared_less", SUITE),
        ({"checks": {SUITE: {"error": 5e-14, "floor": 2e-14}}}, "red", "error_grew", SUITE),
        ({"checks": {MINE: {"ranks": 1}}}, "red", "compared_less", MINE),
        ({"checks": {MINE: {"elements": 99}}}, "red", "compared_less", MINE),
        ({"checks": {MINE: {"layout": "1x1"}}}, "red", "compared_less", MINE),
        ({"exit_code": -9}, "red", "incomplete", "new"),
        ({"exit_code": 3}, "red", "incomplete", "new"),
        ({"exit_code": 1}, "red", "incomplete", "new"),
        ({"collected": 4}, "red", "incomplete", "new"),
        ({"tests": {OTHER: {"outcome": "xfailed", "reason": "ImportError"}}},
         "red", "stopped_running", OTHER),
        ({"tests": {"suite: test_new": {"outcome": "failed"}}},
         "yellow", "appeared_failing", "suite: test_new"),
        ({"asked": {"files": "other"}}, "yellow", "other_checks", "the files of your checks"),
        ({"asked": {"selected": "ddp"}}, "yellow", "other_checks", "the words of -k"),
        ({"checks": {MINE: {"backend": "gloo_fallback"}}}, "red", "lane_changed", MINE),
        ({"checks": {MINE: {"parameters": 3}}}, "red", "compared_less", MINE),
        ({"checks": {MINE: {"dtype": "float32"}}}, "red", "compared_less", MINE),
        ({"checks": {SUITE: {"expected": "different"}}}, "red", "expected_otherwise", SUITE),
        ({"peak_mib": 900.0}, "yellow", "memory_grew", "new"),
        ({"environment": {"variables": {"NCCL_ALGO": "Ring"}}},
         "yellow", "variable_changed", "NCCL_ALGO"),
        ({"checks": {MINE: {"digests": ["a1", "c3"]}}}, "information", "digest_changed", MINE),
        ({"environment": {"torch": "2.13.0"}}, "information", "package_changed", "torch"),
        ({"environment": {"packages": {"torch": "2.12.1"}}},
         "information", "package_changed", "numpy"),
        ({"environment": {"vectors": "AVX2"}}, "information", "machine_changed", "vectors"),
        ({"tests": {"suite: test_new": {}}}, "information", "appeared", "suite: test_new"),
        ({"defaults": {"torch.nn.parallel.DistributedDataParallel(new)": "1"}},
         "information", "default_new", "torch.nn.parallel.DistributedDataParallel(new)"),
    ],
)  # fmt: skip
def test_a_change_has_its_level_and_its_reason(
    changed: dict[str, Any], level: str, kind: str, of: str, tmp_path: Path
) -> None:
    judgement = judged(write(tmp_path / "old"), write(tmp_path / "new", **changed))
    assert (level, kind, of) in found(judgement)
    assert judgement.level == (level if level != "ignored" else "information")
    beside = [one for one in found(judgement) if one[1] not in (kind, "total_slower")]
    assert not beside, "nothing else has changed"
    text = "\n".join(line.text for line in report(judgement))
    assert of in text
    assert KINDS[kind].meaning in text
    assert f"decided by the default level of {kind}" in text


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"checks": {SUITE: {"error": 9e-16}}}, id="an error of three times the floor"),
        pytest.param({"checks": {SUITE: {"error": 0.0}}}, id="no error at all"),
        pytest.param({"checks": {SUITE: {"limit": 6e-14}}}, id="a limit that is hardly wider"),
        pytest.param({"tests": {SUITE: {"seconds": 9.0}}}, id="less than ten seconds"),
        pytest.param({"tests": {SUITE: {"seconds": 40.0, "starts": 1}}}, id="the start of ranks"),
        pytest.param({"peak_mib": 500.0}, id="a quarter more memory"),
    ],
)
def test_noise_is_green(changed: dict[str, Any], tmp_path: Path) -> None:
    judgement = judged(write(tmp_path / "old"), write(tmp_path / "new", **changed))
    assert [one for one in found(judgement) if one[1] != "total_slower"] == []


def test_a_test_that_starts_ranks_compileser_by_processor_time_only(tmp_path: Path) -> None:
    starts = {"starts": 1, "seconds": 0.3, "cpu_seconds": 0.6}
    old = write(tmp_path / "old", tests={SUITE: starts})
    waits = write(tmp_path / "waits", tests={SUITE: starts | {"seconds": 11.0}})
    assert found(judged(old, waits)) == [("yellow", "total_slower", "waits")]
    works = write(tmp_path / "works", tests={SUITE: starts | {"cpu_seconds": 4.0}})
    assert found(judged(old, works)) == [("red", "slower", SUITE)]


def test_a_slow_machine_makes_no_test_slower_than_the_others(tmp_path: Path) -> None:
    seconds = {name: {"seconds": 4.0} for name in TESTS}
    judgement = judged(write(tmp_path / "old"), write(tmp_path / "new", tests=seconds))
    assert found(judgement) == [("yellow", "total_slower", "new")]
    seconds = {name: {"seconds": 3.0} for name in TESTS}
    judgement = judged(tmp_path / "old", write(tmp_path / "other", tests=seconds))
    assert found(judgement) == []  # less than ten seconds in all


def test_a_default_that_is_replaced_inside_is_no_change(tmp_path: Path) -> None:
    new = write(tmp_path / "new", defaults={BUCKET: "<object object>"})
    judgement = judged(write(tmp_path / "old"), new)
    assert found(judgement) == [("information", "default_new", BUCKET)]


def test_what_was_wrong_may_become_right(tmp_path: Path) -> None:
    wrong = {MINE: {"outcome": "different", "cause": "sum_not_mean", "error": 1.0}}
    old = write(tmp_path / "old", checks=wrong, tests={MINE: {"outcome": "failed"}})
    judgement = judged(old, write(tmp_path / "new"))
    assert found(judgement) == [("information", "verdict_better", MINE)]
    skipped = write(tmp_path / "skipped", tests={MINE: {"outcome": "skipped"}})
    assert ("information", "test_passes", MINE) in found(judged(skipped, tmp_path / "new"))


def test_a_known_difference_that_goes_is_worse(tmp_path: Path) -> None:
    known = {"expected": "different", "outcome": "different", "cause": "sum_not_mean"}
    old = write(tmp_path / "old", checks={MINE: known})
    gone = {**known, "outcome": "same", "cause": None}
    judgement = judged(old, write(tmp_path / "new", checks={MINE: gone}))
    assert found(judgement) == [("red", "verdict_worse", MINE)]
    other = {**known, "cause": "averaged_twice"}
    judgement = judged(old, write(tmp_path / "other", checks={MINE: other}))
    assert found(judgement) == [("yellow", "cause_changed", MINE)]


def test_a_test_that_fails_because_of_its_check_is_told_once(tmp_path: Path) -> None:
    worse = {MINE: {"outcome": "different", "error": 1.0}}
    new = write(tmp_path / "new", checks=worse, tests={MINE: {"outcome": "failed"}})
    assert found(judged(write(tmp_path / "old"), new)) == [("red", "verdict_worse", MINE)]


def test_a_record_without_any_comparison_is_red(tmp_path: Path) -> None:
    skipped = {name: {"outcome": "skipped"} for name in TESTS}
    judgement = judged(write(tmp_path / "old"), write(tmp_path / "new", tests=skipped))
    assert ("red", "nothing_compared", "new") in found(judgement)


def test_a_report_shows_the_first_of_many(tmp_path: Path) -> None:
    names = [f"suite: test_{number}" for number in range(30)]
    old = write(tmp_path / "old", tests={name: {} for name in names})
    judgement = judged(old, write(tmp_path / "new"))
    short = "\n".join(line.text for line in report(judgement))
    assert "... and 22 more (--full)" in short
    assert "RED  vanished: 30" in short
    long = "\n".join(line.text for line in report(judgement, full=True))
    assert all(name in long for name in names)


def test_a_name_does_not_command_the_terminal(tmp_path: Path) -> None:
    new = write(tmp_path / "new", tests={"suite: \x1b[2J\nred": {}})
    text = [line.text for line in report(judged(write(tmp_path / "old"), new))]
    assert "  suite: ?[2J?red" in text


def test_every_kind_has_a_level_and_a_sentence() -> None:
    for name, kind in KINDS.items():
        assert kind.level in LEVELS, name
        assert kind.meaning.endswith("."), name


def test_the_documents_list_every_kind() -> None:
    text = (Path(__file__).parents[3] / "docs" / "upgrades.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    expected = [f"| `{name}` | {kind.level} | {kind.meaning} |" for name, kind in KINDS.items()]
    assert rows == expected


def test_the_limit_of_an_exact_check_is_zero(tmp_path: Path) -> None:
    exact = {"error": 0.0, "floor": 0.0, "limit": 0.0}
    old = write(tmp_path / "old", checks={MINE: exact})
    assert found(judged(old, write(tmp_path / "same", checks={MINE: exact}))) == []
    off = write(tmp_path / "off", checks={MINE: {**exact, "error": 4e-14}})
    assert found(judged(old, off)) == [("red", "error_grew", MINE)]
    wide = write(tmp_path / "wide", checks={MINE: {**exact, "limit": 1.0}})
    assert found(judged(old, wide)) == [("red", "limit_grew", MINE)]


def test_an_old_record_that_was_cut_off_is_red_too(tmp_path: Path) -> None:
    judgement = judged(write(tmp_path / "old", ends=False), write(tmp_path / "new"))
    assert found(judgement) == [("red", "incomplete", "old")]


def test_a_check_that_is_gone_from_a_test_that_runs_is_red(tmp_path: Path) -> None:
    new = write(tmp_path / "new", without_checks=(MINE,))
    judgement = judged(write(tmp_path / "old"), new)
    assert found(judgement) == [("red", "vanished", MINE)]
    back = judged(new, tmp_path / "old")
    assert found(back) == [("information", "appeared", f"{MINE} (check 1)")]


def test_a_check_of_a_fixture_may_move_to_another_test(tmp_path: Path) -> None:
    """It belongs to the test that runs first."""
    old = write(tmp_path / "old", without_checks=(MINE,))
    new = write(tmp_path / "new", without_checks=(OTHER,))
    assert found(judged(old, new)) == []


def test_what_was_expected_before_says_what_is_worse(tmp_path: Path) -> None:
    """The test passes: it asks for the difference now."""
    changed = {MINE: {"outcome": "different", "expected": "different", "error": 1.0}}
    judgement = judged(write(tmp_path / "old"), write(tmp_path / "new", checks=changed))
    assert found(judgement) == [
        ("red", "expected_otherwise", MINE),
        ("red", "verdict_worse", MINE),
    ]


def test_a_test_that_fails_for_another_reason_is_named(tmp_path: Path) -> None:
    failed = {OTHER: {"outcome": "failed", "reason": "ValueError: a"}}
    other = {OTHER: {"outcome": "failed", "reason": "ImportError: b"}}
    old, new = write(tmp_path / "old", tests=failed), write(tmp_path / "new", tests=other)
    assert found(judged(old, new)) == [("yellow", "failure_changed", OTHER)]
    assert found(judged(old, old)) == []


def test_a_test_compiles_beside_the_others_and_not_beside_itself(tmp_path: Path) -> None:
    none = dict.fromkeys(TESTS[1:])
    old = write(tmp_path / "old", tests=none)
    new = write(tmp_path / "new", tests={**none, SUITE: {"seconds": 10.3}})
    assert found(judged(old, new))[0] == ("yellow", "waits_longer", SUITE)


def test_what_another_selection_leaves_out_is_one_finding(tmp_path: Path) -> None:
    """A run of all tests of the suite, and one of some: nothing is known of the others."""
    of_suite = [f"suite: test_a[{number}]" for number in range(5)]
    tests = dict.fromkeys(of_suite, EMPTY)
    old = write(tmp_path / "old", tests=tests, asked={"suite": "all"})
    left_out = dict.fromkeys(of_suite[1:])
    new = write(tmp_path / "new", tests={**tests, **left_out}, asked={"suite": "pairwise"})
    judgement = judged(old, new)
    assert [one for one in found(judgement) if one[1] == "vanished"] == [
        ("red", "vanished", "4 tests of the suite")
    ]
    assert "--all" in next(
        one.seen.text for one in judgement.findings if one.seen.kind == "vanished"
    )
    back = judged(new, old)
    assert [one for one in found(back) if one[1] == "appeared"] == [
        ("information", "appeared", "4 tests of the suite")
    ]


def test_a_test_that_a_selection_of_the_same_suite_lacks_is_named(tmp_path: Path) -> None:
    gone, asked = "suite: test_gone", {"suite": "pairwise"}
    old = write(tmp_path / "old", tests={gone: {}}, asked=asked)
    new = write(tmp_path / "new", asked=asked)
    assert ("red", "vanished", gone) in found(judged(old, new))


def test_processor_time_shows_what_a_short_test_takes_longer(tmp_path: Path) -> None:
    """It is that of two ranks, which is what the check of each of these tests has."""
    old = write(tmp_path / "old", tests={SUITE: {"cpu_seconds": 0.6}, MINE: {"cpu_seconds": 0.6}})
    new = write(tmp_path / "new", tests={SUITE: {"cpu_seconds": 1.9}, MINE: {"cpu_seconds": 0.62}})
    assert found(judged(old, new)) == [("red", "slower", SUITE)]
    text = judged(old, new).findings[0].seen.text
    assert "0.30 s -> 0.95 s of processor time on each rank" in text
    first = write(tmp_path / "first", tests={SUITE: {"cpu_seconds": 0.2}})
    imports = write(tmp_path / "imports", tests={SUITE: {"cpu_seconds": 0.9}})
    assert found(judged(first, imports)) == []
    unknown = write(tmp_path / "earlier")  # it has no such times
    assert found(judged(unknown, new)) == []
    busy = {name: {"cpu_seconds": 1.9} for name in TESTS}
    before = {name: {"cpu_seconds": 0.6} for name in TESTS}
    old, new = write(tmp_path / "idle", tests=before), write(tmp_path / "busy", tests=busy)
    assert found(judged(old, new)) == []  # all take longer: the machine does


# --- several records before


def test_what_varied_before_is_no_finding(tmp_path: Path) -> None:
    def with_error(name: str, error: float) -> Recorded:
        return read(write(tmp_path / name, checks={MINE: {"error": error}}))

    small, large, again = with_error("a", 2e-16), with_error("b", 4e-15), with_error("c", 5e-15)
    policy = Policy()
    alone = judge(small, again, policy, TODAY)
    assert ("red", "error_grew", MINE) in found(alone)
    assert found(judge(small, again, policy, TODAY, [large])) == []
    grown = with_error("d", 4e-14)
    assert ("red", "error_grew", MINE) in found(judge(small, grown, policy, TODAY, [large]))


def test_a_red_finding_says_what_the_records_before_have_shown(tmp_path: Path) -> None:
    wrong = {MINE: {"outcome": "different", "cause": "sum_not_mean"}}
    names = ("a", "b", "c", "last")
    *earlier, last = [
        read(write(tmp_path / name, checks=wrong if name == "b" else {})) for name in names
    ]
    new = read(write(tmp_path / "new", checks=wrong))
    (finding,) = judge(last, new, Policy(), TODAY, earlier).findings
    assert finding.seen.kind == "verdict_worse"
    assert finding.seen.text.endswith("; before that same 2 times, different 1 time")


def test_a_limit_that_was_larger_once_allows_nothing(tmp_path: Path) -> None:
    loose = {MINE: {"limit": 1e-3}}
    earlier = [read(write(tmp_path / "a", checks=loose))]
    old, new = read(write(tmp_path / "b")), read(write(tmp_path / "c", checks=loose))
    assert ("red", "limit_grew", MINE) in found(judge(old, new, Policy(), TODAY, earlier))


def test_only_what_was_alike_before_shows_what_is_usual(tmp_path: Path) -> None:
    """Neither a check in another precision, nor a test that failed at its deadline."""
    before = write(
        tmp_path / "before",
        checks={MINE: {"dtype": "float32", "error": 1e-7}},
        tests={MINE: {"outcome": "failed", "reason": "too late", "seconds": 300.0}},
    )
    old, grown = write(tmp_path / "old"), write(tmp_path / "grown", checks={MINE: {"error": 4e-14}})
    slow = write(tmp_path / "slow", tests={MINE: {"seconds": 100.0}})
    earlier = [read(before)]
    for new, level, kind in ((grown, "red", "error_grew"), (slow, "yellow", "waits_longer")):
        assert (level, kind, MINE) in found(judge(read(old), read(new), Policy(), TODAY, earlier))


def test_a_test_that_failed_before_is_not_said_to_have_been_right(tmp_path: Path) -> None:
    """The test fails beside its check, which is right."""
    failed = {MINE: {"outcome": "failed", "reason": "AssertionError"}}
    before = read(write(tmp_path / "before", tests=failed))
    old, new = read(write(tmp_path / "old")), read(write(tmp_path / "new", tests=failed))
    (finding,) = judge(old, new, Policy(), TODAY, [before]).findings
    assert finding.seen.kind == "test_failed"
    assert finding.seen.text.endswith("; before that failed 1 time")


def test_an_expected_failure_that_is_mended_is_good_news(tmp_path: Path) -> None:
    record = read(write(tmp_path / "old"))
    wrong = replace(record.checks[MINE, 0], outcome="different", cause="sum_not_mean")
    record.tests[MINE], record.checks[MINE, 0] = RecordedTest("xfailed", 0.2), wrong
    judgement = judge(record, read(write(tmp_path / "new")), Policy(), TODAY)
    assert {level for level, _, _ in found(judgement)} == {"information"}


def test_the_whole_run_may_need_more_processor_time(tmp_path: Path) -> None:
    old = write(tmp_path / "old", tests={name: {"cpu_seconds": 6.0} for name in TESTS})
    new = write(tmp_path / "new", tests={name: {"cpu_seconds": 12.0} for name in TESTS})
    assert found(judged(old, new)) == [("yellow", "total_slower", "new")]


def test_a_default_that_was_an_object_has_changed(tmp_path: Path) -> None:
    name = "torch.distributed.fsdp.fully_shard(offload_policy"
    other = {"torch.distributed.fsdp.fully_shard(mesh)": "None"}
    old = write(tmp_path / "old", defaults={**other, f"{name}.pin_memory)": "True"})
    new = write(tmp_path / "new", defaults={**other, f"{name})": "None"})
    for one, another in ((old, new), (new, old)):
        assert ("red", "default_changed", f"{name})") in found(judged(one, another))
        assert len(judged(one, another).findings) == 1


def test_runs_with_other_numbers_of_workers_are_not_held_to_one_time(tmp_path: Path) -> None:
    before = {name: {"seconds": 10.0} for name in TESTS}
    old = read(write(tmp_path / "old", tests=before))
    new = read(write(tmp_path / "new", tests={name: {"seconds": 20.0} for name in TESTS}))
    assert found(judge(old, new, Policy(), TODAY)) == [("yellow", "total_slower", "new")]
    new.facts = {**new.facts, "workers": "2"}
    assert found(judge(old, new, Policy(), TODAY)) == []
