"""What the planner knows of a cluster: devices, memory, and two kinds of links.

A description is a small JSON file; ``clusters/`` holds some, with the sources of their figures, all of them per rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Cluster", "Link", "read_cluster", "preset_names"]

PRESETS = Path(__file__).parent / "clusters"
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
NEEDED = {
    *("name", "ranks_per_host", "memory_bytes", "memory_bandwidth", "compute", "efficiency", "inside", "between"),
}
OPTIONAL = {"buffer_bytes", "buffer_copies", "sources"}


@dataclass(frozen=True)
class Link:
    """A rank's own part of a link.

    Attributes:
        bandwidth: bytes per second that leave the rank. latency: seconds that a message takes to start.
        pair_bandwidth: of it to one other rank, where each pair has a link of its own; None where all share one.
    """

    bandwidth: float
    latency: float
    pair_bandwidth: float | None = None

    def speed(self, peers: int) -> float:
        """Bytes per second to so many others at once."""
        return self.bandwidth if self.pair_bandwidth is None else min(self.bandwidth, peers * self.pair_bandwidth)


@dataclass(frozen=True)
class Cluster:
    """One cluster, seen from one rank.

    Attributes:
        ranks_per_host: ranks that the inside links join; consecutive ranks fill a host.
        memory_bytes: memory of a rank's device. memory_bandwidth: bytes per second to and from it.
        compute: peak flops per second by dtype. efficiency: the part of it that large matrix products reach.
        inside, between: links inside a host, and between hosts.
        buffer_bytes: what the communication backend takes per group beside the tensors unless told otherwise; 0 for
            none. buffer_copies: how many of them a group takes.
        sources: where each figure comes from, or that it is an assumption.
    """

    name: str
    ranks_per_host: int
    memory_bytes: int
    memory_bandwidth: float
    compute: Mapping[str, float]
    efficiency: float
    inside: Link
    between: Link
    buffer_bytes: int = 0
    buffer_copies: int = 0
    sources: Mapping[str, str] = field(default_factory=dict)

    def ranks_inside(self, stride: int, size: int) -> int:
        """Of a group of ``size`` ranks, ``stride`` apart, those that share a host."""
        return max(1, min(size, self.ranks_per_host // stride))


def preset_names() -> tuple[str, ...]:
    """The clusters that the package describes."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.json")))


def read_cluster(cluster: str | Path | Mapping[str, Any]) -> Cluster:
    """A cluster from the name of a preset, the path of a JSON file, or its content.

    Raises:
        ValueError: an unknown name, or fields that are missing, unknown or not positive; it names them.
    """
    fields = cluster if isinstance(cluster, Mapping) else _load(str(cluster))
    if missing := sorted(NEEDED - set(fields)):
        raise ValueError(f"the cluster lacks {', '.join(missing)}")
    if unknown := sorted(set(fields) - NEEDED - OPTIONAL):
        known = ", ".join(sorted(NEEDED | OPTIONAL))
        raise ValueError(f"the cluster has unknown {', '.join(unknown)}; its fields are {known}")
    links = {where: _link(where, fields[where]) for where in ("inside", "between")}
    found = Cluster(**{**fields, **links})
    _check(found)
    return found


def _load(name: str) -> dict[str, Any]:
    path = PRESETS / f"{name}.json" if name in preset_names() else Path(name)
    if not path.exists():
        raise ValueError(f"no cluster {name!r}: neither a file nor one of {', '.join(preset_names())}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _link(where: str, fields: Any) -> Link:
    needed = {"bandwidth", "latency"}
    if not isinstance(fields, Mapping) or set(fields) - {"pair_bandwidth"} != needed:
        raise ValueError(
            f"{where} must have bandwidth (bytes per second), latency (seconds) and, where each pair of ranks has a "
            f"link of its own, pair_bandwidth, got {fields!r}"
        )
    return Link(**fields)


def _check(cluster: Cluster) -> None:
    numbers = {
        "ranks_per_host": cluster.ranks_per_host,
        "memory_bytes": cluster.memory_bytes,
        "memory_bandwidth": cluster.memory_bandwidth,
        "efficiency": cluster.efficiency,
        "inside.bandwidth": cluster.inside.bandwidth,
        "between.bandwidth": cluster.between.bandwidth,
        **{f"compute.{dtype}": flops for dtype, flops in cluster.compute.items()},
    }
    for name, value in numbers.items():
        if not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    if unknown := sorted(set(cluster.compute) - set(DTYPES)):
        raise ValueError(f"compute knows {', '.join(DTYPES)}, got {', '.join(unknown)}")
