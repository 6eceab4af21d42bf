"""Plans as a table and in words; with rich if it is installed, as plain text if not."""

from __future__ import annotations

import io
from collections.abc import Sequence

from hyper_parallel.plan.search import Plan, Request

__all__ = ["bytes_text", "seconds_text", "table", "reasons"]

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
COLUMNS = (
    *("dp", "ep", "tp", "style", "recompute", "fits", "memory", "experts", "states", "activations", "buffers"),
    *("time", "exposed", "over ep", "over tp", "over dp"),
)


def bytes_text(n: float) -> str:
    """In powers of 1000."""
    unit = 0
    while abs(n) >= 999.5 and unit < len(UNITS) - 1:
        n, unit = n / 1000, unit + 1
    return f"{n:.3g} {UNITS[unit]}"


def seconds_text(seconds: float) -> str:
    """A time with its unit, three digits: "1.25 s", "12.5 ms"."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _row(one: Plan) -> list[str]:
    memory, leaving = one.memory, {axis: of["inside"] + of["between"] for axis, of in one.traffic.items()}
    states = memory.parameters + memory.gradients + memory.optimizer
    sizes = memory.total, memory.expert_parameters, states, memory.activations, memory.buffers
    return [
        *map(str, (one.dp, one.ep, one.tp)),
        one.style + "*" * bool(one.notes),
        one.recompute,
        "yes" if one.fits else "no",
        *map(bytes_text, sizes),
        seconds_text(one.time.total),
        seconds_text(one.time.exposed),
        *(bytes_text(leaving[axis]) for axis in ("ep", "tp", "dp")),
    ]


def table(plans: Sequence[Plan], limit: int = 12) -> str:
    """The best plans; of styles that do the same on a mesh, the simplest."""
    rows = [_row(one) for one in plans if one.is_plain][:limit]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return _plain(rows)
    drawn = Table(*COLUMNS)
    for row in rows:
        drawn.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=sum(_widths(rows)) + 3 * len(COLUMNS) + 1).print(drawn)
    return out.getvalue().rstrip()


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(COLUMNS, *rows)]


def _plain(rows: Sequence[Sequence[str]]) -> str:
    widths = _widths(rows)
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in (COLUMNS, *rows))


def reasons(request: Request, plans: Sequence[Plan]) -> str:
    """Why the first plan wins, what the next would cost, and how the best of the other styles compare."""
    plans = [one for one in plans if one.is_plain]
    if not plans:
        model = request.model
        return (
            f"No legal plan: ep must divide {model.num_experts} experts and {request.ranks} ranks, tp the hidden size "
            f"{model.hidden_dim}, and dp x ep the {request.tokens} tokens."
        )
    first, *others = plans
    lines = [_verdict(request, first)]
    if not first.fits:
        short = first.memory.total - request.cluster.memory_bytes
        lines.append(
            f"Nothing fits: even this lacks {bytes_text(short)} a rank. More ranks, ZeRO, or fewer tokens help."
        )
    if others:
        lines.append(f"Next: {others[0].name}: {_compared(first, others[0])}.")
    plain = next((one for one in plans if one.style == "ExpertParallel"), None)
    tensor = next((one for one in plans if one.ep > 1 and one.tp > 1), None)
    if first.style != "ExpertParallel" and plain:
        lines.append(f"Best of plain EP: {plain.name}: {_compared(first, plain)}.")
    if not (first.ep > 1 and first.tp > 1) and tensor:
        lines.append(f"Best with ep and tp: {tensor.name}: {_compared(first, tensor)}.")
    return "\n".join([*lines, *(f"Note: {note}." for note in (*request.model.notes, *first.notes))])


def _verdict(request: Request, one: Plan) -> str:
    what = {
        "ExpertParallel": "plain EP" if one.ep > 1 else "data parallelism alone",
        "TensorParallel": "TP of the experts",
    }.get(one.style, one.style)
    room = request.cluster.memory_bytes - one.memory.total
    fits = f"leaves {bytes_text(room)} of a device free" if one.fits else "does not fit"
    cost = f"{seconds_text(one.time.total)} a step, {bytes_text(one.memory.total)} a rank"
    return f"Take {what}: {one.name}, {cost}; {fits}."


def _compared(first: Plan, other: Plan) -> str:
    parts = ("experts", "elementwise", "dense", "ep", "tp", "dp")
    change = {part: getattr(other.time, part) - getattr(first.time, part) for part in parts}
    most = max(change, key=lambda part: abs(change[part]))
    names = {"ep": "the links of ep", "tp": "the links of tp", "dp": "sums of gradients", "dense": "dense layers"}
    text = f"{other.time.total / first.time.total:.2f} times the time"
    if abs(change[most]) > 1e-9:
        text += f" ({'+' if change[most] > 0 else '-'}{seconds_text(abs(change[most]))} in {names.get(most, most)})"
    text += f", {other.memory.total / first.memory.total:.2f} times the memory"
    return text if other.fits else text + ", which does not fit"
