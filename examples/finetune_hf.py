"""From a Hugging Face folder to a run with Expert Tensor Parallelism, and back to a folder.

    python examples/finetune_hf.py

A small Qwen3-MoE is written as a Hugging Face folder. Four ranks read it, each its own slices, and train on the source
files of the Python standard library; one of them is killed. Four ranks of another mesh, under FSDP2, go on from the
last checkpoint and export the model as a Hugging Face folder again, which transformers reads and lets write some text.
The loss curves are laid over that of one device in report.png.

The ranks are started by this script. One part of it may also be started by hand:

    torchrun --nproc-per-node 4 examples/finetune_hf.py --part first
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from moe_lm.data import CHARACTERS, Text
from moe_lm.progress import Progress
from moe_lm.ranks import RunFailed, end_with_launcher, ended_in_order, start_and_follow
from moe_lm.settings import SETTINGS

PROMPT = "def read(self):\n"
PARTS = ("one-device", "first", "then")


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train a small Hugging Face MoE model with ETP, and compare it.")
    parser.add_argument("--mesh", type=_mesh, default="1,2,2", help="dp,ep,tp of the ranks that are killed")
    parser.add_argument("--then", type=_mesh, default="2,2,1", help="dp,ep,tp of those that go on from the checkpoint")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"), help="folder of the report")
    parser.add_argument("--part", choices=PARTS, help="one run alone, started by its launcher")
    options = parser.parse_args()
    s = SETTINGS
    if options.steps < 4:
        parser.error("--steps must be at least 4: there is a checkpoint after a quarter of them")
    for name in ("mesh", "then"):
        dp, ep, tp = getattr(options, name)
        if s.num_experts % ep or s.batch % (dp * ep) or 96 % tp:
            parser.error(
                f"--{name} {dp},{ep},{tp}: ep must divide {s.num_experts} experts, dp * ep the {s.batch} sequences of "
                "a step, and tp the experts' hidden size, 96"
            )
    if importlib.util.find_spec("transformers") is None:
        parser.error("transformers is not installed here; `make finetune` installs it and runs this")
    return options


def _mesh(text):
    sizes = tuple(int(size) for size in text.split(","))
    if len(sizes) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"expected three sizes of at least 1, as 1,2,2; got {text}")
    return sizes


def run_all(options):
    """Start every run, and report. Returns the exit code."""
    from hf_finetune.model import make_folder
    from hf_finetune.report import write_report
    from hf_finetune.runs import BASE, runs_of

    make_folder(SETTINGS, options.out / BASE)
    curves = []
    with Progress(options.steps) as progress:
        for run in runs_of(options.mesh, options.then).values():
            progress.start(run.title)
            records = []
            try:
                for record in start_and_follow(run, _script(run, options), options.out):
                    progress.update(record)
                    records.append(record)
            except RunFailed:
                if not run.dies or not records:
                    raise
            curves.append((run, records))
    return 0 if write_report(curves, *_read_again(options), options.out) else 1


def _script(run, options):
    meshes = [f"--{name}={','.join(map(str, getattr(options, name)))}" for name in ("mesh", "then")]
    script = [Path(__file__).resolve(), "--part", run.part, *meshes, "--steps", options.steps, "--out", options.out]
    return [str(part) for part in script]


def _read_again(options):
    """The held-out loss of the exported model, as transformers reads it, and what it writes."""
    import torch
    from hf_finetune.runs import FINETUNED
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.out / FINETUNED).eval()
    ids, targets = map(torch.from_numpy, Text(SETTINGS).held_out_batch())
    prompt = torch.tensor([[CHARACTERS.index(character) for character in PROMPT]])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten()).item()
        torch.manual_seed(SETTINGS.seed)
        written = model.generate(prompt, max_new_tokens=2 * SETTINGS.sequence, do_sample=True, temperature=0.7)[0]
    return loss, "".join(CHARACTERS[i] if i < len(CHARACTERS) else "?" for i in written.tolist())


def main():
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part:
        from hf_finetune.runs import runs_of, train

        end_with_launcher()
        return train(runs_of(options.mesh, options.then)[options.part], options.steps, options.out)
    return ended_in_order(lambda: run_all(options))


if __name__ == "__main__":
    sys.exit(main())
