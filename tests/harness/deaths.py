"""Killing a process before a chosen operation on files, in a program that is to be run as a process of its own."""

import os
import sys

__all__ = ["died"]

EVENTS = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.rmdir",
    "os.remove",
    "os.truncate",
    "shutil.rmtree",
    "shutil.copytree",
)


def died(at, folder, work):
    """Call ``work()`` in a fork that dies before its ``at``-th operation on files in a path that has ``folder`` in it.

    Returns:
        whether it came to that: False when there are fewer operations, and the work was done.
    """
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event, arguments):
            nonlocal seen
            if event in EVENTS and folder in str(arguments[0] if event != "os.rename" else arguments):
                seen += 1
                if seen == at:
                    os._exit(9)

        sys.addaudithook(count)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
