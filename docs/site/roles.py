"""Docstrings name code as ``:func:`x```, which editors know; the site shows the name."""

import re

import griffe


class Roles(griffe.Extension):
    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = re.sub(r":(?:func|meth|class|mod):`~?([^`]+)`", r"`\1`", obj.docstring.value)
