"""The replacement of objects in forked children, where every owner of a resource must do nothing.

A forked child shares open files, shared memory and connections with its parent, but none of the parent's threads. A
child that wrote a checkpoint or shut a tier down would use the parent's files with an outdated view of their content.
"""

from __future__ import annotations

import os
import types
import weakref
from collections.abc import Collection
from functools import partial
from typing import Any

_owners: weakref.WeakKeyDictionary[object, type | Collection[str]] = weakref.WeakKeyDictionary()


def inert_in_children(owner: object, inert: type | Collection[str]) -> None:
    """Replace the methods of an object in every child that is forked from now on.

    The registration does not keep ``owner`` alive. Its class changes in the child only, so calls in this process have
    no extra cost.

    Args:
        owner: the object that owns resources of this process.
        inert: class whose public methods, inherited ones too, replace those of ``owner``; or names of methods that do
            nothing there.
    """
    _owners[owner] = inert


def _after_fork() -> None:
    for owner, inert in list(_owners.items()):
        kind = type(owner)
        names = [name for name in dir(inert) if name[0] != "_"] if isinstance(inert, type) else inert
        methods = {name: method for name in names if callable(method := getattr(inert, name, _do_nothing))}
        owner.__class__ = types.new_class(f"Forked{kind.__name__}", (kind,), exec_body=partial(_fill, methods))
    _owners.clear()


def _do_nothing(*_: object, **__: object) -> None:
    """Stand for a method in a child to which the parent's resources do not belong."""


def _fill(methods: dict[str, Any], namespace: dict[str, Any]) -> None:
    namespace.update(methods)


os.register_at_fork(after_in_child=_after_fork)
