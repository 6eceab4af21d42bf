"""Cases of modules that pytest's own process does not import, because they import a framework."""

import importlib


def call(context, case, **arguments):
    """Call ``"module:function"`` on the rank."""
    module, function = case.split(":")
    return getattr(importlib.import_module(module), function)(context, **arguments)
