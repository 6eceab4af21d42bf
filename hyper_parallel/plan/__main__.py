"""``python -m hyper_parallel.plan``: plans for a model on a cluster, as a table, JSON, a picture, or one in full."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from hyper_parallel.plan.cluster import DTYPES, preset_names, read_cluster
from hyper_parallel.plan.config import read_config
from hyper_parallel.plan.explain import explain, find_plan
from hyper_parallel.plan.imbalance import read_load
from hyper_parallel.plan.memory import OPTIMIZERS, RECOMPUTE
from hyper_parallel.plan.report import reasons, table
from hyper_parallel.plan.search import Request, make_plans

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hyper_parallel.plan",
        description="Which dp x ep x tp, which style and which memory, for this model on this cluster.",
    )
    add = parser.add_argument
    add("--config", required=True, help="config.json of a Hugging Face MoE model, or its folder")
    add("--ranks", type=int, required=True, help="ranks of the whole cluster")
    add("--tokens", type=int, required=True, help="tokens of one step over all ranks")
    add("--sequence", type=int, help="tokens of one sequence (default: those of one step, at most 4096)")
    add("--cluster", default="atlas-a2", help=f"{', '.join(preset_names())}, or a JSON file (default: %(default)s)")
    add("--dtype", default="bf16", choices=DTYPES, help="of weights and activations (default: %(default)s)")
    add("--optimizer", default="adamw", choices=OPTIMIZERS, help="(default: %(default)s)")
    add("--recompute", default="any", choices=("any", *RECOMPUTE), help="(default: %(default)s)")
    add("--zero", type=int, default=0, choices=(0, 1, 2, 3), help="stage of ZeRO over the replicas (default: 0)")
    add("--sequence-parallel", action="store_true", help="tokens between layers are cut over tp (MoESequenceParallel)")
    add("--load", metavar="FILE", help="recorded load: JSON with one list of counts per MoE layer")
    add("--zipf", type=float, metavar="S", help="assume that the i-th expert is chosen as often as 1 / i^S")
    add("--limit", type=int, default=12, help="rows of the table (default: %(default)s)")
    add(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        help="write all plans as JSON; without FILE, in place of the table",
    )
    add("--png", metavar="FILE", help="draw memory against time, and where both go; needs matplotlib")
    add("--explain", metavar="PLAN", help='print one plan in full: "ep4tp2", "ep4tp2 split full"')
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0, or 2 after a message about what was given."""
    given = _parser().parse_args(arguments)
    try:
        model = read_config(given.config)
        request = Request(
            model=model,
            cluster=read_cluster(given.cluster),
            ranks=given.ranks,
            tokens=given.tokens,
            sequence=min(4096, given.tokens) if given.sequence is None else given.sequence,
            dtype=given.dtype,
            optimizer=given.optimizer,
            recompute=given.recompute,
            zero=given.zero,
            load=None if given.load is None else read_load(given.load, model.num_experts),
            zipf=given.zipf,
            sequence_parallel=given.sequence_parallel,
        )
        plans = make_plans(request)
        chosen = find_plan(plans, given.explain) if given.explain else None
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.png and plans:
        from hyper_parallel.plan.picture import draw

        draw(request, plans, given.png)
    if given.json:
        _write_json(given.json, plans)
    if given.json == "-":
        return 0
    if chosen:
        print(explain(request, chosen))
    else:
        print(table(plans, given.limit) if plans else "", reasons(request, plans), sep="\n\n")
    return 0


def _write_json(path: str, plans: Sequence) -> None:
    text = json.dumps({"plans": [one.as_dict() for one in plans]}, indent=1)
    if path == "-":
        print(text)
        return
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
