"""The command: arguments, the run on this rank, and what is put into the report."""

import argparse
import importlib
import os
import platform as python
import sys
import zlib
from collections.abc import Sequence

import numpy as np

import hyper_parallel as hp
from hyper_parallel.check.experts import TOLERANCE, parity_errors
from hyper_parallel.check.operations import OPERATIONS, run_operation
from hyper_parallel.check.probe import Axis, Probe
from hyper_parallel.check.report import Finding, Report
from hyper_parallel.core.expert_parallel.sharded import debugging
from hyper_parallel.core.types import Mesh
from hyper_parallel.platform import VARIABLE, get_platform, set_platform

__all__ = ["main"]

SUMMARY = "Check a cluster before it is used."


def main(argv: list[str] | None = None) -> int:
    """Run the check; returns the exit code.

    Args:
        argv: arguments, by default those of the command line.
    """
    options = _parser().parse_args(argv)
    try:
        return _check(options)
    except (RuntimeError, ValueError, ImportError) as error:
        if debugging():
            raise
        print(f"hyper_parallel.check: rank {_rank_from_environment()}: {error}", file=sys.stderr, flush=True)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hyper_parallel.check", description=SUMMARY)
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
        return _run(Probe(get_platform(), session, device_type), options)
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


def _run(probe: Probe, options: argparse.Namespace) -> int:
    """The check on this rank, once communication is there; returns the exit code."""
    num_ranks = probe.platform.world_size(probe.device_type)
    ep, tp = _degrees(options.ep, options.tp, num_ranks)
    mesh = hp.init_device_mesh(probe.device_type, (ep, tp), mesh_dim_names=("ep", "tp"))
    world = hp.init_device_mesh(probe.device_type, (num_ranks,), mesh_dim_names=("world",))
    ranks = np.arange(num_ranks).reshape(ep, tp)
    ep_rank, tp_rank = mesh.get_local_rank("ep"), mesh.get_local_rank("tp")
    ep_axis = Axis("ep", mesh["ep"], tuple(ranks[:, tp_rank].tolist()), ep_rank)
    tp_axis = Axis("tp", mesh["tp"], tuple(ranks[ep_rank].tolist()), tp_rank)
    everyone = Axis("all", world, tuple(range(num_ranks)), world.get_local_rank())
    report = Report(probe, everyone)

    description = _description(probe)
    report.say("hyper_parallel.check", *(f"  {name:<16}{words}" for name, words in description.items()))
    report.say(*(f"  {name:<16}{words}" for name, words in _groups(ranks).items()))
    findings = [_versions(description), *_collectives(probe, (ep_axis, tp_axis, everyone))]
    right = report.show("operation", findings)
    if right:
        right = report.show("experts over ep x tp against one device: relative error", _parity(probe, mesh))
    else:
        report.say("", "experts: not run, because they rest on the operations above")
    report.say("", "all right" if right else "FAILED")
    # Launchers end all ranks once the first has failed: none leaves before rank 0 has printed.
    report.exchange([])
    return 0 if right else 1


def _degrees(ep: int | None, tp: int | None, num_ranks: int) -> tuple[int, int]:
    """The missing ones of ep and tp, so that all ranks are used."""
    for name, degree in (("ep", ep), ("tp", tp)):
        if degree is not None and degree < 1:
            raise ValueError(f"--{name} must be at least 1, got {degree}")
    if not tp:
        without_ep = 2 if num_ranks % 2 == 0 and num_ranks > 2 else 1
        tp = max(1, num_ranks // ep) if ep else without_ep
    ep = ep or max(1, num_ranks // tp)
    if ep * tp != num_ranks:
        raise ValueError(f"ep {ep} x tp {tp} takes {ep * tp} ranks, but {num_ranks} are running")
    return ep, tp


def _description(probe: Probe) -> dict[str, str]:
    own = {"hyper_parallel": hp.__version__, "python": python.python_version(), "numpy": np.__version__}
    return {**own, **probe.session.description(probe.device_type)}


def _groups(ranks: np.ndarray) -> dict[str, str]:
    """Words on the mesh of ``ranks`` [ep, tp]."""
    words = {"mesh": f"ep {ranks.shape[0]} x tp {ranks.shape[1]}"}
    for name, groups in (("groups of ep", ranks.T.tolist()), ("groups of tp", ranks.tolist())):
        shown = " ".join(str(group) for group in groups[:4])
        words[name] = shown if len(groups) <= 4 else f"{shown} ... ({len(groups)} groups)"
    return words


def _versions(description: dict[str, str]) -> Finding:
    text = "; ".join(f"{name} {words}" for name, words in description.items())
    # 24 bits of it, which a float32 carries exactly.
    return Finding("same versions and device", True, float(zlib.crc32(text.encode()) & 0xFFFFFF))


def _collectives(probe: Probe, axes: Sequence[Axis]) -> list[Finding]:
    return [
        Finding(f"{operation}, {axis.name}", _explained(axis.rank, run_operation(operation, probe, axis)))
        for operation in OPERATIONS
        for axis in axes
    ]


def _parity(probe: Probe, mesh: Mesh) -> list[Finding]:
    findings, rank = [], mesh.get_local_rank("ep") * mesh.size(1) + mesh.get_local_rank("tp")
    for dtype in probe.session.float_types(probe.device_type):
        limit = TOLERANCE[dtype]
        for quantity, error in parity_errors(probe, mesh, dtype).items():
            wrong = None if error < limit else f"{dtype}, {quantity}: relative error {error:.1e}, limit {limit:.0e}"
            findings.append(Finding(f"{dtype}, {quantity}", _explained(rank, wrong), error, is_error=True))
    return findings


def _explained(rank: int, wrong: str | None) -> bool:
    if wrong:
        print(f"hyper_parallel.check: rank {rank}: {wrong}", file=sys.stderr, flush=True)
    return not wrong
