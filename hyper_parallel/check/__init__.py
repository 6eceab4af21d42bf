"""Check a cluster before it is used: ``python -m hyper_parallel.check``, started like any program of several ranks.

    platform/torch/launch.sh 4 -m hyper_parallel.check --ep 2 --tp 2
    platform/mindspore/launch.sh 4 -m hyper_parallel.check --ep 2 --tp 2

Rank 0 prints versions, groups, and a table: every collective that the library uses, on every group of the mesh, with
results known in advance; then experts over the mesh against one device. A rank with a wrong result says itself what it
expected and received. The exit code is 0 if all is right and 1 if not, on every rank. An error of the framework is
shown in one line per rank, with ``HYPER_PARALLEL_DEBUG=1`` with its traceback.
"""

from hyper_parallel.check.command import main

__all__ = ["main"]
