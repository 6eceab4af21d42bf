"""``python -m hyper_parallel.checkpoint inspect FOLDER`` and ``... consolidate FOLDER OUT``."""

import argparse
import sys

from hyper_parallel.checkpoint.agreement import CheckpointError
from hyper_parallel.checkpoint.consolidation import consolidate, describe

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hyper_parallel.checkpoint", description="Checkpoints as files.")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="say what a checkpoint holds, and check the sizes of its files")
    inspect.add_argument("folder")
    whole = commands.add_parser("consolidate", help="write the same checkpoint with whole tensors")
    whole.add_argument("folder")
    whole.add_argument("out")
    options = parser.parse_args(argv)
    try:
        if options.command == "inspect":
            print(describe(options.folder))
        else:
            consolidate(options.folder, options.out)
    except (CheckpointError, OSError) as error:
        print(f"hyper_parallel.checkpoint: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
