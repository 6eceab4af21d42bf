"""A table and a verdict, in a report and on the terminal."""

from itertools import zip_longest

from rich.console import Console
from rich.table import Table

__all__ = ["markdown_table", "show_table", "show_verdict"]


def markdown_table(header, rows):
    """Rows of texts as Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


def show_table(header, rows, width, styles=()):
    """Print rows of texts, and return the console.

    Args:
        width: in characters, where the output is no terminal. styles: of the rows, where they have one.
    """
    console = Console()
    if not console.is_terminal:
        console.width = width
    table = Table(*header)
    for row, style in zip_longest(rows, styles):
        table.add_row(*row, style=style)
    console.print(table)
    return console


def show_verdict(console, verdict, is_good, *files):
    """Print the verdict, and where the report is."""
    console.print(verdict, style="green" if is_good else "bold red", highlight=False)
    console.print(f"Report: {' and '.join(map(str, files))}", highlight=False, soft_wrap=True)
