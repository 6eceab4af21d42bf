"""``hyper_parallel.check`` passes on good ranks; on bad ones it fails on every rank and says what is wrong where."""

import re
import subprocess
import sys

import pytest

from tests.distributed.check_cases import run_check

AXES = ("ep", "tp", "all")
TWO_BY_TWO = ("--ep", "2", "--tp", "2")


def results(output):
    """The table: operation -> result."""
    return dict(re.findall(r"^  (\S.*?)  +(?:\d\.\de.\d\d  )?(ok|WRONG.*)$", output, re.M))


def wrong(output):
    return {name: result.removeprefix("WRONG on ") for name, result in results(output).items() if result != "ok"}


@pytest.mark.parametrize("arguments", [(), ("--ep", "4"), ("--tp", "4")], ids=" ".join)
def test_good_ranks(pool, arguments):
    per_rank = pool.run(run_check, arguments=arguments)
    codes, (output, *others), errors = zip(*per_rank)
    assert codes == (0,) * 4, errors
    assert others == [""] * 3 and set(errors) == {""}
    num_types = {"torch": 3, "mindspore": 2}[pool.platform]  # MindSpore's CPU has no products in bfloat16
    assert len(results(output)) == 1 + 11 * 3 + num_types * 4
    assert not wrong(output) and output.endswith("all right\n")
    for word in ("hyper_parallel", "numpy", pool.platform, "backend", "groups of ep"):
        assert re.search(rf"^  {word} +\S", output, re.M), word
    sizes = {(): "ep 2 x tp 2", ("--ep", "4"): "ep 4 x tp 1", ("--tp", "4"): "ep 1 x tp 4"}[arguments]
    assert re.search(rf"^  mesh +{sizes}$", output, re.M)


@pytest.mark.parametrize(
    "verb,operations",
    [
        ("start_counts_exchange", ["all-to-all of counts"]),
        (
            "all_to_all_rows",
            ["all-to-all of rows", "all-to-all to one rank", "all-to-all of 8 MB", "all-to-all in bfloat16"],
        ),
        ("sum_over_group", ["all-reduce", "all-reduce of 8 MB", "all-reduce in bfloat16"]),
        ("distribute_tensor", ["broadcast", "scatter and all-gather", "scatter and all-gather of 8 MB"]),
    ],
)
def test_zeros_on_one_rank(pool, verb, operations):
    """What CANN 8.3 did: no error, only zeros."""
    codes, outputs, errors = zip(*pool.run(run_check, arguments=TWO_BY_TWO, breaks=(verb,), on_ranks=(2,)))
    assert codes == (1,) * 4
    found = wrong(outputs[0])
    # An all-to-all to the first rank of a group leaves nothing to be wrong on the others of it.
    expected = {f"{operation}, {axis}" for operation in operations for axis in AXES}
    assert set(found) == expected - {"all-to-all to one rank, ep", "all-to-all to one rank, all"}
    assert set(found.values()) == {"rank 2"}
    assert "experts: not run" in outputs[0] and outputs[0].endswith("FAILED\n")
    assert [bool(text) for text in errors] == [False, False, True, False]
    assert f"rank 2: {operations[0]} over ep, ranks [0, 2]: " in errors[2]


@pytest.mark.parametrize("kind", ["of 8 MB", "in bfloat16"])
def test_a_transport_that_is_wrong_for_some_messages_only(pool, kind):
    """One number of a message over 1 MB, or of one in bfloat16: nothing else notices, and the check fails."""
    codes, outputs, errors = zip(*pool.run(run_check, arguments=TWO_BY_TWO, breaks=(f"last element {kind}",)))
    assert codes == (1,) * 4
    operations = {f"{operation} {kind}, {axis}" for operation in ("all-to-all", "all-reduce") for axis in AXES}
    assert set(wrong(outputs[0])) == operations
    assert all(f"all-to-all {kind} over ep, ranks [" in text for text in errors)


def test_the_message_names_source_and_values(pool):
    *_, (_, _, errors) = pool.run(run_check, arguments=TWO_BY_TWO, breaks=("all_to_all_rows",), on_ranks=(3,))
    where, what = "all-to-all of rows over tp, ranks [2, 3]", "1 of 1 rows wrong, from ranks [3]"
    assert f"{where}: {what}; the first holds 0 in place of 303" in errors


def test_findings_arrive_though_one_way_is_broken_everywhere(pool):
    for verb in ("sum_over_group", "all_to_all_rows"):
        codes, outputs, _ = zip(*pool.run(run_check, arguments=TWO_BY_TWO, breaks=(verb,)))
        assert codes == (1,) * 4
        assert wrong(outputs[0]) and "did not arrive" not in outputs[0]


def test_nothing_arrives_where_both_ways_are_broken(pool):
    breaks = ("sum_over_group", "all_to_all_rows")
    codes, outputs, _ = zip(*pool.run(run_check, arguments=TWO_BY_TWO, breaks=breaks))
    assert codes == (1,) * 4
    assert "what ranks 0, 1, 2, 3 found did not arrive" in outputs[0]


def test_wrong_experts_on_good_collectives(pool):
    codes, outputs, errors = zip(*pool.run(run_check, arguments=TWO_BY_TWO, breaks=("drop_tp_sum",)))
    assert codes == (1,) * 4
    found = wrong(outputs[0])
    assert {"float32, output", "float64, output"} <= set(found)
    assert set(found.values()) == {"ranks 0, 1, 2, 3"} and all("float" in name for name in found)
    assert all("float32, output: relative error" in text for text in errors)


def test_other_versions_on_one_rank(pool):
    codes, outputs, _ = zip(*pool.run(run_check, breaks=("description",), on_ranks=(1,)))
    assert codes == (1,) * 4
    assert wrong(outputs[0]) == {"same versions and device": "rank 1"}


def test_an_error_is_one_line_per_rank(pool):
    for rank, (code, _, errors) in enumerate(pool.run(run_check, breaks=("error",))):
        assert code == 1
        assert errors == f"hyper_parallel.check: rank {rank}: no link\n"


def test_a_mesh_that_does_not_fit(pool):
    for rank, (code, output, errors) in enumerate(pool.run(run_check, arguments=("--ep", "3"))):
        assert code == 1 and not output
        assert errors == f"hyper_parallel.check: rank {rank}: ep 3 x tp 1 takes 3 ranks, but 4 are running\n"


def test_without_a_launcher(platform):
    command = [sys.executable, "-m", "hyper_parallel.check", "--platform", platform]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    launcher = {"torch": "torchrun", "mindspore": "msrun"}[platform]
    assert f"no rank is set in the environment; start this with {launcher}" in done.stderr
