"""Train one small MoE language model under many arrangements, and compare each with one device.

    python examples/train_matrix.py --platform both

Data parallel, experts over ep, tp and both, fewer bytes over ep, sequence parallel, FSDP2 (torch), recompute,
accumulation, mixed precision. Every run starts from the same weights and sees the same data; losses, the first step's
gradients and the last step's weights are held against one device in fp32. The table is in matrix.md, the picture in
matrix.png, and the exit code is 1 when an arrangement is out of its limits. Ranks are started once per framework.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from moe_lm.arrangements import arrangements
from moe_lm.matrix import SMALLER, Start, forget_reference, joined, train_under, write_records
from moe_lm.matrix_report import Row, write_report
from moe_lm.progress import Progress
from moe_lm.ranks import end_with_launcher, ended_in_order, keep_to_one_core, start_and_follow
from moe_lm.weights import save_initial_weights


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train a small MoE language model under many arrangements.")
    parser.add_argument("--platform", choices=("torch", "mindspore", "both"), default="both")
    parser.add_argument("--ranks", type=int, choices=(4, 8), default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="only arrangements with one of the words")
    parser.add_argument("--without-sums", action="store_true", help="leave out sums of gradients: many rows differ")
    parser.add_argument("--out", type=Path, help="folder of the report; runs/matrix-<platform>-<ranks> by default")
    parser.add_argument("--ranks-here", type=int, help=argparse.SUPPRESS)  # for the processes started here: how many
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    options.platforms = ("torch", "mindspore") if options.platform == "both" else (options.platform,)
    for platform in options.platforms:
        if importlib.util.find_spec(platform) is None:
            parser.error(f"{platform} is not installed here; `make matrix PLATFORM={platform}` installs and runs it")
        if not rows_of(options, Start(platform, options.ranks)):
            parser.error(f"no arrangement of {platform} on {options.ranks} ranks has any of: {' '.join(options.only)}")
    options.out = options.out or Path("runs") / f"matrix-{options.platform}-{options.ranks}"
    return options


def rows_of(options, start):
    rows = arrangements(start.platform, start.num_ranks)
    return [row for row in rows if start.one_device or not options.only or any(w in row.title for w in options.only)]


def train_here(options):
    """This process is one of the ranks of a start."""
    start = Start(options.platform, options.ranks_here)
    end_with_launcher()
    if start.platform == "mindspore":
        keep_to_one_core(start)
    with joined(start) as rank:
        records = train_under(start, rows_of(options, start), options.steps, options.out, not options.without_sums)
        write_records(records, options.out / f"{start.name}.jsonl" if rank == 0 else None)


def train_and_compare(options):
    """Start the ranks of every platform, and report. Returns the exit code."""
    save_initial_weights(SMALLER, options.out)
    forget_reference(options.out)
    starts = [Start(platform, ranks) for platform in options.platforms for ranks in (1, options.ranks)]
    found = []
    with Progress(options.steps, SMALLER.tokens) as progress:
        for start in starts:
            rows, records = rows_of(options, start), {}
            progress.start(f"{start.title}: starting")
            for record in start_and_follow(start, _script(start, options), options.out):
                _note(record, records, progress)
            found += [Row.of(start.platform, row, records[row.title]) for row in rows]
    return 0 if write_report(found, options.out) else 1


def _note(record, records, progress):
    """Keep a record by its arrangement, and show it."""
    if "title" not in record:
        return
    if record["title"] not in records:
        progress.start(record["title"])
    records.setdefault(record["title"], []).append(record)
    progress.update(record)


def _script(start, options):
    arguments = ["--platform", start.platform, "--ranks", options.ranks, "--ranks-here", start.num_ranks]
    arguments += ["--steps", options.steps, "--out", options.out]
    arguments += ["--only", *options.only] if options.only else []
    arguments += ["--without-sums"] if options.without_sums else []
    return [str(part) for part in (Path(__file__).resolve(), *arguments)]


def main():
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.ranks_here:
        return train_here(options)
    return ended_in_order(lambda: train_and_compare(options))


if __name__ == "__main__":
    sys.exit(main())
