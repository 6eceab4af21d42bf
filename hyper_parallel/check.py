"""Check a cluster before it is used: ``python -m hyper_parallel.check``, started like any program of several ranks.

    platform/torch/launch.sh 4 -m hyper_parallel.check --ep 2 --tp 2
    platform/mindspore/launch.sh 4 -m hyper_parallel.check --ep 2 --tp 2

Rank 0 prints versions, groups, and a table: every collective that the library uses, on every group of the mesh, with
results known in advance; then experts over the mesh against one device. A rank with a wrong result says itself what it
expected and received. The exit code is 0 if all is right and 1 if not, on every rank. An error of the framework is
shown in one line per rank, with ``HYPER_PARALLEL_DEBUG=1`` with its traceback.
"""

import argparse
import importlib
import os
import platform as python
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.expert_parallel.expert_parallel import DEBUG_VARIABLE
from hyper_parallel.core.types import Mesh, Tensor
from hyper_parallel.platform import VARIABLE, get_platform, set_platform
from hyper_parallel.self_test import OPERATIONS, TOLERANCE, Axis, Bench, parity_errors, run_operation

__all__ = ["main"]

RIGHT, WRONG = 1.0, 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit code.

    Args:
        argv: arguments, by default those of the command line.
    """
    options = _parser().parse_args(argv)
    try:
        return _check(options)
    except (RuntimeError, ValueError, ImportError) as error:
        if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
            raise
        print(f"hyper_parallel.check: rank {_rank_from_environment()}: {error}", file=sys.stderr, flush=True)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hyper_parallel.check", description=__doc__.splitlines()[0])
    parser.add_argument("--ep", type=int, help="ranks over which experts are split (default: all that tp leaves)")
    parser.add_argument("--tp", type=int, help="ranks that share an expert (default: 2 on an even number from 4, or 1)")
    parser.add_argument("--device", help="cpu, npu or cuda (default: the accelerator that is found, or cpu)")
    parser.add_argument("--platform", choices=["torch", "mindspore"], help="default: the launcher's")
    return parser


def _check(options: argparse.Namespace) -> int:
    _choose_platform(options.platform)
    session = importlib.import_module(f"hyper_parallel.platform.{get_platform().name}.session")
    device_type = options.device or session.default_device_type()
    joined = session.join(device_type)
    try:
        return _run(Bench(get_platform(), session, device_type), options)
    finally:
        if joined:
            session.leave()


def _choose_platform(name: str | None) -> None:
    """Follow the launcher, unless the user said which: both frameworks may be installed."""
    if name is None and not os.environ.get(VARIABLE):
        launchers = {"MS_ROLE": "mindspore", "RANK_TABLE_FILE": "mindspore", "WORLD_SIZE": "torch"}
        name = next((platform for variable, platform in launchers.items() if variable in os.environ), None)
    if name is not None:
        set_platform(name)


def _rank_from_environment() -> str:
    return os.environ.get("RANK") or os.environ.get("RANK_ID") or "?"


def _run(bench: Bench, options: argparse.Namespace) -> int:
    """The check on this rank, once communication is there; returns the exit code."""
    num_ranks = bench.platform.world_size(bench.device_type)
    ep, tp = _degrees(options.ep, options.tp, num_ranks)
    mesh = hp.init_device_mesh(bench.device_type, (ep, tp), mesh_dim_names=("ep", "tp"))
    world = hp.init_device_mesh(bench.device_type, (num_ranks,), mesh_dim_names=("world",))
    ranks = np.arange(num_ranks).reshape(ep, tp)
    ep_rank, tp_rank = mesh.get_local_rank("ep"), mesh.get_local_rank("tp")
    ep_axis = Axis("ep", mesh["ep"], tuple(ranks[:, tp_rank].tolist()), ep_rank)
    tp_axis = Axis("tp", mesh["tp"], tuple(ranks[ep_rank].tolist()), tp_rank)
    everyone = Axis("all", world, tuple(range(num_ranks)), world.get_local_rank())
    report = _Report(bench, everyone)

    description = _description(bench)
    report.say("hyper_parallel.check", *(f"  {name:<16}{words}" for name, words in description.items()))
    report.say(*(f"  {name:<16}{words}" for name, words in _groups(ranks).items()))
    findings = [_versions(description), *_collectives(bench, (ep_axis, tp_axis, everyone))]
    right = report.show("operation", findings)
    if right:
        right = report.show("experts over ep x tp against one device: relative error", _parity(bench, mesh))
    else:
        report.say("", "experts: not run, because they rest on the operations above")
    report.say("", "all right" if right else "FAILED")
    # Launchers end all ranks once the first has failed: none leaves before rank 0 has printed.
    report.exchange([])
    return 0 if right else 1


def _degrees(ep: int | None, tp: int | None, num_ranks: int) -> tuple[int, int]:
    """The missing ones of ep and tp, so that all ranks are used."""
    if not tp:
        without_ep = 2 if num_ranks % 2 == 0 and num_ranks > 2 else 1
        tp = max(1, num_ranks // ep) if ep else without_ep
    ep = ep or max(1, num_ranks // tp)
    if ep * tp != num_ranks:
        raise ValueError(f"ep {ep} x tp {tp} takes {ep * tp} ranks, but {num_ranks} are running")
    return ep, tp


def _description(bench: Bench) -> dict[str, str]:
    own = {"hyper_parallel": hp.__version__, "python": python.python_version(), "numpy": np.__version__}
    return {**own, **bench.session.description(bench.device_type)}


def _groups(ranks: np.ndarray) -> dict[str, str]:
    """Words on the mesh of ``ranks`` [ep, tp]."""
    words = {"mesh": f"ep {ranks.shape[0]} x tp {ranks.shape[1]}"}
    for name, groups in (("groups of ep", ranks.T.tolist()), ("groups of tp", ranks.tolist())):
        shown = " ".join(str(group) for group in groups[:4])
        words[name] = shown if len(groups) <= 4 else f"{shown} ... ({len(groups)} groups)"
    return words


@dataclass(frozen=True)
class _Finding:
    """What this rank found in one check. ``number`` is shown if ``is_error``; else it must be the same on all ranks."""

    title: str
    right: bool
    number: float = 0.0
    is_error: bool = False


def _versions(description: dict[str, str]) -> _Finding:
    text = "; ".join(f"{name} {words}" for name, words in description.items())
    # 24 bits of it, which a float32 carries exactly.
    return _Finding("same versions and device", True, float(zlib.crc32(text.encode()) & 0xFFFFFF))


def _collectives(bench: Bench, axes: Sequence[Axis]) -> list[_Finding]:
    return [
        _Finding(f"{operation}, {axis.name}", _explained(axis.rank, run_operation(operation, bench, axis)))
        for operation in OPERATIONS
        for axis in axes
    ]


def _parity(bench: Bench, mesh: Mesh) -> list[_Finding]:
    findings, rank = [], mesh.get_local_rank("ep") * mesh.size(1) + mesh.get_local_rank("tp")
    for dtype in bench.session.float_types(bench.device_type):
        limit = TOLERANCE[dtype]
        for quantity, error in parity_errors(bench, mesh, dtype).items():
            wrong = None if error < limit else f"{dtype}, {quantity}: relative error {error:.1e}, limit {limit:.0e}"
            findings.append(_Finding(f"{dtype}, {quantity}", _explained(rank, wrong), error, is_error=True))
    return findings


def _explained(rank: int, wrong: str | None) -> bool:
    if wrong:
        print(f"hyper_parallel.check: rank {rank}: {wrong}", file=sys.stderr, flush=True)
    return not wrong


class _Report:
    """Brings the findings of all ranks together, and prints them on rank 0."""

    def __init__(self, bench: Bench, everyone: Axis) -> None:
        self._bench, self._everyone = bench, everyone

    def say(self, *lines: str) -> None:
        if self._everyone.position == 0:
            print("\n".join(lines), flush=True)

    def show(self, title: str, findings: Sequence[_Finding]) -> bool:
        """Print a table; whether every rank found everything right. Every rank gets the same answer."""
        rights, numbers, arrived = self.exchange(findings)
        self.say("", title)
        for check, finding in enumerate(findings):
            right, number = rights[:, check], numbers[:, check]
            if not finding.is_error:
                right = right & (number == number[0])
            wrong = np.flatnonzero(arrived & ~right)
            result = "ok" if len(wrong) == 0 else f"WRONG on {_named(wrong)}"
            if finding.is_error:
                result = f"{number[arrived].max(initial=0):.1e}  {result}"
            self.say(f"  {finding.title:<36}{result}")
            rights[:, check] = right
        if not arrived.all():
            self.say(f"  what {_named(np.flatnonzero(~arrived))} found did not arrive")
        return bool(arrived.all() and rights.all())

    def exchange(self, findings: Sequence[_Finding]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What all ranks found: whether right [P, C], numbers [P, C], and whether a rank's findings arrived [P].

        The collectives that carry the findings are those under test. So they go two ways, and a row counts only if it
        says whose it is and holds nothing but verdicts: zeros or another rank's row are no findings.
        """
        place, num_ranks, group = self._everyone.position, len(self._everyone.ranks), self._everyone.mesh.get_group()
        verdicts = [RIGHT if finding.right else WRONG for finding in findings]
        own = np.asarray([1.0 + place, *verdicts, *(finding.number for finding in findings)], np.float32)
        one_of_all = np.zeros((num_ranks, len(own)), np.float32)
        one_of_all[place] = own
        ones = (1,) * num_ranks
        platform = self._bench.platform
        summed = platform.sum_over_group(self._tensor(one_of_all), group, "check: sum of the findings")
        sent = platform.all_to_all_rows(
            self._tensor(np.tile(own, (num_ranks, 1))), ones, ones, group, "check: all-to-all of the findings"
        )
        rows = np.zeros((num_ranks, len(own)))
        arrived = np.zeros(num_ranks, bool)
        for way in (summed, sent):
            values = self._bench.array(way)
            judged = np.isin(values[:, 1 : 1 + len(findings)], (RIGHT, WRONG)).all(axis=1)
            valid = (values[:, 0] == 1 + np.arange(num_ranks)) & judged
            rows[valid & ~arrived] = values[valid & ~arrived]
            arrived |= valid
        return rows[:, 1 : 1 + len(findings)] == RIGHT, rows[:, 1 + len(findings) :], arrived

    def _tensor(self, values: np.ndarray) -> Tensor:
        return self._bench.session.tensor(values, "float32", self._bench.device_type)


def _named(ranks: np.ndarray) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(str(rank) for rank in ranks)}"


if __name__ == "__main__":
    sys.exit(main())
