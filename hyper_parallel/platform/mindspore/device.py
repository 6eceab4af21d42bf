"""Which implementations run: those for Ascend devices, or the portable ones. Decided here and nowhere else.

MindSpore does not let the device target change once something has been computed, so it is asked once.
"""

import functools
import logging

import mindspore as ms

__all__ = ["collectives", "kernels", "on_ascend"]

logger = logging.getLogger("hyper_parallel")


def collectives():
    """The module with the names of ``cpu_collectives`` that runs on this device."""
    return _modules()[0]


def kernels():
    """The module with the names of ``kernels`` that runs on this device."""
    return _modules()[1]


@functools.cache
def on_ascend():
    return ms.get_context("device_target") == "Ascend"


@functools.cache
def _modules():
    from hyper_parallel.platform.mindspore import ascend_collectives, ascend_kernels, cpu_collectives, kernels

    modules = (ascend_collectives, ascend_kernels) if on_ascend() else (cpu_collectives, kernels)
    names = [module.__name__.rpartition(".")[2] for module in modules]
    logger.info("mindspore, device target %s: %s and %s", ms.get_context("device_target"), *names)
    return modules
