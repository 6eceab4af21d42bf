"""Measure everything in one run, print it, and write benchmark.md, benchmark.json, benchmark.png and growth.png."""

import argparse
import datetime
import importlib.util
import json
import subprocess
import time
from pathlib import Path

from rich.console import Console

from tests.benchmark import chart, growth, report, torch_cases
from tests.benchmark.settings import Work, full_plan, quick_plan
from tests.benchmark.summary import TOLERANCE, Disagreement, mindspore_summary, summarize
from tests.harness import oracle
from tests.harness.pool import ROOT, RankPool

NUM_RANKS = 4
EXPLAINED_MESH = (2, 2)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"), help="folder for what is written")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test the tool; the numbers mean nothing")
    parser.add_argument("--layers", default="experts,moe", help="of experts,moe")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of float32,bfloat16")
    parser.add_argument("--repetitions", type=int, help="instead of the plan's number")
    parser.add_argument("--no-mindspore", action="store_true", help="leave MindSpore out")
    parser.add_argument("--no-growth", action="store_true", help="leave out how cost grows")
    arguments = parser.parse_args(argv)
    results = measure(arguments, quick_plan() if arguments.quick else full_plan())
    report.show(results)
    write(results, arguments.out)


def measure(arguments, plan):
    """All results, as values that JSON knows."""
    progress, began = Console(stderr=True), time.monotonic()

    def tell(text):
        progress.print(f"[{time.monotonic() - began:5.0f} s] {text}", highlight=False)

    results = {"date": f"{datetime.date.today():%Y-%m-%d}", "commit": _commit(), "shape": str(plan.works[0].shape)}
    works = [w for w in plan.works if w.layer in arguments.layers.split(",") and w.dtype in arguments.dtypes.split(",")]
    with RankPool("torch", NUM_RANKS, collective_limit_s=120) as pool:
        results["machine"] = f"{pool.run(torch_cases.machine)[0]}, {NUM_RANKS} ranks that share them"
        results["works"] = []
        for work in works:
            how = {"num_repetitions": arguments.repetitions or plan.num_repetitions[work.dtype]}
            how["explain"] = (work.ep, work.tp) == EXPLAINED_MESH
            result = summarize(work, pool.run(torch_cases.compare, time_limit_s=600, work=work, **how))
            results["works"].append(result)
            ratios = {pair: f"{quartiles['both'][1]:.2f}" for pair, quartiles in result["ratios"].items()}
            tell(f"{work}: {', '.join(f'{pair} {ratio}' for pair, ratio in ratios.items())}")
        if importlib.util.find_spec("mindspore") and not arguments.no_mindspore:
            tell("MindSpore beside torch")
            results["mindspore"] = beside_mindspore(pool, plan)
    if not arguments.no_growth:
        tell("growth")
        results["growth"] = {
            "host_arithmetic": growth.host_arithmetic(),
            "mesh_set_up": growth.mesh_set_up(),
            "layers": growth.layers(plan),
        }
    tell("done")
    return results


def beside_mindspore(torch_pool, plan):
    """The same experts in turns on ranks of torch and of MindSpore; only one framework's ranks work at a time."""
    from tests.benchmark import mindspore_cases

    work, rounds = Work("experts", "float32", 2, 2, plan.mindspore_shape), []
    with RankPool("mindspore", NUM_RANKS, collective_limit_s=120) as pool:
        arguments = {"time_limit_s": 600, "work": work}
        pairs = zip(torch_pool.run(torch_cases.outputs, **arguments), pool.run(mindspore_cases.outputs, **arguments))
        difference = max(oracle.relative_error(b, a) for of_rank in pairs for a, b in zip(*of_rank))
        if not difference < TOLERANCE[work.dtype]:
            raise Disagreement(f"MindSpore's experts differ from torch's by {difference}, so their times mean nothing")
        for _ in range(plan.num_mindspore_rounds):
            of_torch = torch_pool.run(torch_cases.turns, num_repetitions=2, **arguments)
            rounds.append((of_torch, pool.run(mindspore_cases.turns, num_repetitions=2, **arguments)))
        profile = pool.run(mindspore_cases.profile, num_repetitions=2, **arguments)[0]
    return {"work": str(work), "difference": difference, "profile": profile, **mindspore_summary(rounds)}


def write(results, folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "benchmark.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "benchmark.md").write_text(report.markdown(results), encoding="utf-8")
    chart.draw_ratios(results, folder / "benchmark.png")
    if "growth" in results:
        chart.draw_growth(results, folder / "growth.png")


def _commit():
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
