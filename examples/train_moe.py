"""Train a small MoE language model with Expert Tensor Parallelism, and compare it with one device.

    python examples/train_moe.py --platform both

Next-character prediction over the source files of the Python standard library. The same model, written in each
framework's own idiom, starts from the same weights and sees the same data on one device, with ETP on PyTorch, and with
ETP on MindSpore; so the loss curves must lie on one another. They are drawn, beside the load of each expert, into
report.png; the table is in report.md.

Ranks are started by this script. They may also be started by hand, for training alone:

    torchrun --nproc-per-node 4 examples/train_moe.py --platform torch
    msrun --worker_num 4 --local_worker_num 4 --join True examples/train_moe.py --platform mindspore
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

from moe_lm.progress import Progress
from moe_lm.ranks import end_with_launcher, ended_in_order, keep_to_one_core, launched_platform, start_and_follow
from moe_lm.report import Curve, write_report
from moe_lm.settings import SETTINGS
from moe_lm.training import Run, train
from moe_lm.weights import save_initial_weights


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train a small MoE language model with ETP, and compare it.")
    parser.add_argument("--platform", choices=("torch", "mindspore", "both"), default="both")
    parser.add_argument("--ep", type=int, default=2, help="ranks that share out the experts")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share out each expert's hidden dim")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="folder of the report; runs/<platform>-<ep>x<tp> by default")
    parser.add_argument("--one-device", action="store_true", help=argparse.SUPPRESS)  # for the processes started here
    options = parser.parse_args()

    s = SETTINGS
    if min(options.ep, options.tp, options.steps) < 1:
        parser.error("--ep, --tp and --steps must be at least 1")
    if s.num_experts % options.ep or s.batch % options.ep:
        parser.error(f"--ep {options.ep} must divide the {s.num_experts} experts and the {s.batch} sequences of a step")
    if s.hidden_dim % options.tp:
        parser.error(f"--tp {options.tp} must divide the experts' hidden size, {s.hidden_dim}")
    launched = launched_platform()
    if launched and options.platform != launched:
        parser.error(f"ranks started by {launched}'s launcher train on it: --platform {launched}")
    options.platforms = ("torch", "mindspore") if options.platform == "both" else (options.platform,)
    for platform in options.platforms:
        if importlib.util.find_spec(platform) is None:
            parser.error(f"{platform} is not installed here; `make demo PLATFORM={platform}` installs and runs it")
    options.out = options.out or Path("runs") / f"{options.platform}-{options.ep}x{options.tp}"
    return options


def train_here(options):
    """This process is one of a run's processes."""
    run = Run(options.platform, options.ep, options.tp, options.one_device)
    end_with_launcher()
    if run.platform == "mindspore":
        keep_to_one_core(run)
    save_initial_weights(SETTINGS, options.out)
    train(run, options.steps, options.out)


def train_and_compare(options):
    """Start every run, and report. Returns the exit code."""
    runs = [Run(options.platforms[0], one_device=True)]
    runs += [Run(platform, options.ep, options.tp) for platform in options.platforms]
    save_initial_weights(SETTINGS, options.out)
    curves = []
    with Progress(options.steps) as progress:
        for run in runs:
            progress.start(run.title)
            start, records = time.perf_counter(), []
            for record in start_and_follow(run, _script(run, options), options.out):
                progress.update(record)
                records.append(record)
            curves.append(Curve.of(run, records, time.perf_counter() - start))
    return 0 if write_report(curves, options.out) else 1


def _script(run, options):
    arguments = ["--platform", run.platform, "--ep", run.ep, "--tp", run.tp, "--steps", options.steps]
    script = [Path(__file__).resolve(), *arguments, "--out", options.out, *(["--one-device"] if run.one_device else [])]
    return [str(part) for part in script]


def main():
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.one_device or launched_platform():
        return train_here(options)
    return ended_in_order(lambda: train_and_compare(options))


if __name__ == "__main__":
    sys.exit(main())
