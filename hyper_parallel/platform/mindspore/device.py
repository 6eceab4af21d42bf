"""Which implementations run: those for Ascend devices, or the portable ones. Decided here and nowhere else.

MindSpore does not let the device target change once something has been computed, so it is asked once.
"""

import functools
import importlib
import logging
from types import ModuleType

import mindspore as ms

__all__ = ["collectives", "experts", "on_ascend", "routing", "rows"]

logger = logging.getLogger("hyper_parallel")

ASCEND = {room: f"ascend_{room}" for room in ("collectives", "experts", "routing", "rows")}
PORTABLE = {room: room for room in ASCEND} | {"collectives": "cpu_collectives"}


def collectives() -> ModuleType:
    """The module with the names of ``cpu_collectives`` that runs on this device."""
    return _rooms()["collectives"]


def experts() -> ModuleType:
    """The module with the names of ``experts`` that runs on this device."""
    return _rooms()["experts"]


def routing() -> ModuleType:
    """The module with the names of ``routing`` that runs on this device."""
    return _rooms()["routing"]


def rows() -> ModuleType:
    """The module with the names of ``rows`` that runs on this device."""
    return _rooms()["rows"]


@functools.cache
def on_ascend() -> bool:
    return ms.get_context("device_target") == "Ascend"


@functools.cache
def _rooms():
    names = ASCEND if on_ascend() else PORTABLE
    logger.info("mindspore, device target %s: %s", ms.get_context("device_target"), ", ".join(names.values()))
    return {room: importlib.import_module(f"{__package__}.{name}") for room, name in names.items()}
