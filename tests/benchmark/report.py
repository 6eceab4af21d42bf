"""The tables, for the terminal and as Markdown."""

from rich.console import Console
from rich.table import Table

__all__ = ["tables", "show", "markdown", "aims"]

MIB = 2**20
DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16"}
CONTENDERS = {
    "floor": "floor",
    "titan": "TorchTitan",
    "ours": "ours",
    "scores inside": "ours, scores inside",
    "dedup": "ours, dedup",
    "split": "ours, split",
}
LAYER_NAMES = {"experts": "experts", "moe": "MoE layer"}


def tables(results):
    """(title, explanation, header, rows) of every table."""
    found = [_times(results["works"]), _memory(results["works"]), _where(results["works"])]
    if aims(results):
        rows = [[what, f"{a:.2f}", f"{value:.2f}", "yes" if value <= a else "no"] for what, a, value in aims(results)]
        found.append(("Aims", "What this project wants to reach.", ["ratio", "at most", "measured", "reached"], rows))
    if results.get("mindspore"):
        found += _mindspore(results["mindspore"])
    return found + (_growth(results["growth"]) if "growth" in results else [])


def aims(results):
    """(what, aim, measured): of the ratios that have an aim."""
    found = []
    for result in results["works"]:
        name = _name(result)
        ratios = {pair: value["both"][1] for pair, value in result["ratios"].items()}
        fp32, experts = result["dtype"] == "float32", result["layer"] == "experts"
        if experts and fp32:
            found.append((f"{name}: ours / floor", 1.25, ratios["ours / floor"]))
        if "titan" not in result["memory"]:
            continue
        limit = 0.6 if not fp32 else 0.75 if experts else 0.65
        found.append((f"{name}: ours / TorchTitan", limit, ratios["ours / titan"]))
        kept = result["memory"]["ours"]["kept"] / result["memory"]["titan"]["kept"]
        found.append((f"{name}: activation memory, ours / TorchTitan", 0.7, kept))
    return found


def show(results):
    console = Console(width=150)
    console.print(results["machine"], f"{results['date']}, commit {results['commit']}", sep="\n")
    for title, explanation, header, rows in tables(results):
        table = Table(title=title, caption=explanation, title_justify="left", caption_justify="left")
        for number, column in enumerate(header):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def markdown(results):
    lines = [
        "# Benchmark",
        "",
        f"{results['machine']}. {results['shape']}. {results['date']}, commit {results['commit']}.",
        "",
        "![Time relative to the floor](benchmark.png)",
        "",
        "![How cost grows](growth.png)",
    ]
    for title, explanation, header, rows in tables(results):
        lines += ["", f"## {title}", "", explanation, "", _line(header)]
        lines.append(_line(["---"] + ["---:"] * (len(header) - 1)))
        lines += [_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def _line(cells):
    return f"| {' | '.join(cells)} |"


def _name(result):
    ep, tp = result["mesh"]
    return f"{LAYER_NAMES[result['layer']]}, {DTYPE_NAMES[result['dtype']]}, ({ep}, {tp})"


def _spread(quartiles):
    low, middle, high = quartiles
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def _times(works):
    header = ["layer, dtype, mesh (ep, tp)", "contender", "forward ms", "backward ms", "forward / floor"]
    header += ["backward / floor", "both / floor", "both / TorchTitan", "processor time / TorchTitan"]
    rows = []
    for result in works:
        for contender in CONTENDERS:
            times = result["milliseconds"].get(contender)
            if times is None:
                continue
            first = _name(result) if contender == "floor" else ""
            row = [first, CONTENDERS[contender]]
            row += [f"{times['forward']:.0f}", f"{times['backward']:.0f}"]
            to_floor = result["ratios"].get(f"{contender} / floor")
            row += [_spread(to_floor[p]) for p in ("forward", "backward", "both")] if to_floor else ["1", "1", "1"]
            for ratios in (result["ratios"], result["processor_ratios"]):
                to_titan = ratios.get(f"{contender} / titan")
                row.append(_spread(to_titan["both"]) if to_titan else "")
            rows.append(row)
    text = (
        "Median and quartiles of the ratios within each repetition. The floor is the matrix products by the fastest "
        "call and the raw collectives of the rows. In the MoE layer ours multiplies rows by scores before the experts, "
        'as TorchTitan does; "scores inside" is ours as it comes, which is another function. "dedup" and "split" are '
        "the styles that send fewer bytes over ep than the floor does."
    )
    return "Time", text, header, rows


def _memory(works):
    header = ["layer, dtype, mesh (ep, tp)", "contender", "kept MiB", "/ TorchTitan", "peak MiB", "/ TorchTitan"]
    header += ["MiB over ep, fwd + bwd", "MiB over tp, fwd + bwd", "copies to host"]
    rows = []
    for result in works:
        contenders = [name for name in CONTENDERS if name in result["memory"]]
        for contender in contenders:
            memory, titan = result["memory"][contender], result["memory"].get("titan")
            row = [_name(result) if contender == contenders[0] else "", CONTENDERS[contender]]
            for kind in ("kept", "peak"):
                row += [f"{memory[kind] / MIB:.1f}", f"{memory[kind] / titan[kind]:.2f}" if titan else ""]
            for axis in ("ep", "tp"):
                sent = result["traffic"][contender].get(axis)
                row.append(" + ".join(f"{size / MIB:.1f}" for size in sent) if sent else "-")
            rows.append([*row, str(result["host_copies"][contender])])
    text = (
        "Kept: bytes that forward leaves alive for backward, its output among them; peak: most alive at one time, "
        "gradients among them; both without parameters and inputs, on the rank that has most. Bytes: handed to "
        "collectives of more than one rank, mean of the ranks. Copies to the host: in one forward and backward, had "
        "the tensors been on a device."
    )
    return "Memory and communication per rank", text, header, rows


def _where(works):
    works = [result for result in works if result["where"]]
    kinds = list(works[0]["where"]["ours"]) if works else []
    rows = []
    for result in works:
        contenders = [name for name in CONTENDERS if name in result["where"]]
        for contender in contenders:
            first = _name(result) if contender == contenders[0] else ""
            seconds = list(result["where"][contender].values())
            rows.append([first, CONTENDERS[contender], *(f"{1e3 * s:.0f}" for s in [*seconds, sum(seconds)])])
    text = "Processor milliseconds per rank of one forward and backward, by operators as torch's dispatcher sees them."
    return "Where the time goes", text, ["layer, dtype, mesh (ep, tp)", "contender", *kinds, "all"], rows


def _mindspore(found):
    rows = []
    for what, value in found["milliseconds"].items():
        rows.append([what, f"{value['forward']:.0f} ms", f"{value['both']:.0f} ms"])
    for what, value in found["ratios"].items():
        rows.append([what, _spread(value["forward"]), _spread(value["both"])])
    text = (
        f"The same experts on {found['work']}. MindSpore's floor: its own products and collectives for the same work. "
        f"Largest difference of output and row gradients from torch's: {found['difference']:.0e}."
    )
    times = ("MindSpore", text, ["", "forward", "forward and backward"], rows)
    total = sum(seconds for seconds, _ in found["profile"].values())
    ordered = sorted(found["profile"].items(), key=lambda item: -item[1][0])[:8]
    rows = [[what, f"{1e3 * s:.0f}", f"{100 * s / total:.0f} %", f"{n:.0f}"] for what, (s, n) in ordered]
    text = "Forward and backward on rank 0; an operator is complete when its call returns. The profiler slows Python."
    return [times, ("MindSpore: where the time goes", text, ["place", "ms", "share", "calls"], rows)]


def _growth(growth):
    host = [[f"{e}", f"{p}", f"{r}", f"{ms:.2f}"] for e, p, r, ms in growth["host_arithmetic"]]
    meshes = [[str(tuple(shape)), f"{one:.3f}", f"{every:.0f}"] for shape, one, every in growth["mesh_set_up"]]
    found = [
        (
            "Host work per call",
            "Splits, order and inverse order of one dispatch, on the host.",
            ["experts", "ep", "rows received", "ms"],
            host,
        ),
        (
            "Mesh of 4,096 ranks",
            "Rank arithmetic without process groups: coordinates, the ranks of each axis, two slices.",
            ["shape", "ms for one rank", "ms for all ranks"],
            meshes,
        ),
    ]
    titles = {"experts": "experts, same rows", "tokens": "tokens", "ranks": "ranks = ep, same tokens each"}
    for what, title in titles.items():
        rows = [[f"{n}", f"{a:.0f}", f"{b:.0f}", f"{a / b:.2f}"] for n, a, b in growth["layers"][what]]
        text = "Processor time per rank of forward and backward of the experts layer."
        found.append((f"Growing number of {title}", text, [what, "ours ms", "floor ms", "ours / floor"], rows))
    return found
