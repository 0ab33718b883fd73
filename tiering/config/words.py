"""Descriptions of the words of a stack, read from the source of the option classes."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from itertools import pairwise

from pydantic import BaseModel


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring of each attribute of ``model`` and its bases, as one line."""
    texts: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, BaseModel) and kind.__module__.split(".")[0] != "pydantic":
            texts.update(_own_descriptions(kind))
    return texts


@functools.cache
def _own_descriptions(kind: type) -> Mapping[str, str]:
    """Return the docstring of each attribute that the class itself declares; its source is parsed once."""
    parsed = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    texts: dict[str, str] = {}
    for statements in pairwise(parsed.body if isinstance(parsed, ast.ClassDef) else ()):
        match statements:
            case ast.AnnAssign(target=ast.Name(id=word)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[word] = " ".join(text.split())
    return texts
