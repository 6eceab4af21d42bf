"""A progress bar per run on a terminal, and a line now and then elsewhere."""

from collections import deque

from rich import progress as rich_progress
from rich.console import Console

from moe_lm.settings import SETTINGS

__all__ = ["Progress"]

STEPS_PER_LINE = 10


class Progress:
    """Shows one run after the other; to be used as a context manager."""

    def __init__(self, steps, tokens=SETTINGS.tokens):
        self.steps, self.tokens, self.console = steps, tokens, Console()
        self.bars = rich_progress.Progress(
            rich_progress.TextColumn("{task.description:<24}"),
            rich_progress.BarColumn(30),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("{task.fields[state]:<34}"),
            rich_progress.TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def __enter__(self):
        self.bars.__enter__()
        return self

    def __exit__(self, *error):
        self.bars.__exit__(*error)

    def start(self, title):
        self.title, self.seconds = title, deque(maxlen=STEPS_PER_LINE)
        self.task = self.bars.add_task(title, total=self.steps, state="starting")
        self._line("starting")

    def update(self, record):
        """Show one record of ``training.train``."""
        if "step" not in record:
            return
        self.seconds.append(record["seconds"])
        tokens_per_second = self.tokens * len(self.seconds) / sum(self.seconds)
        state = f"loss {record['loss']:.4f}  {tokens_per_second:>8,.0f} tokens/s"
        self.bars.update(self.task, completed=record["step"] + 1, state=state)
        if (record["step"] + 1) % STEPS_PER_LINE == 0 or record["step"] in (0, self.steps - 1):
            self._line(f"step {record['step'] + 1:>4} of {self.steps}  {state}")

    def _line(self, text):
        if not self.console.is_terminal:
            print(f"{self.title:<24} {text}", flush=True)
