"""A child made by fork takes no part in what its parent has opened: in the child, whatever owns something does nothing.

A child shares open files, shared memory and connections with its parent, but none of the parent's threads.  If it wrote
a checkpoint, or shut a tier down, it would do so with the parent's files and with its own idea of what they hold.
"""

from __future__ import annotations

import os
import types
import weakref
from functools import partial
from typing import Any

_owners: weakref.WeakKeyDictionary[object, type] = weakref.WeakKeyDictionary()


def inert_in_children(owner: object, inert: type) -> None:
    """Let the methods of ``inert`` take the place of those of ``owner`` in every child that is forked from now on.

    ``owner`` is not kept alive.  Its class changes in the child only, so that calls cost nothing more in this process.
    """
    _owners[owner] = inert


def _after_fork() -> None:
    for owner, inert in list(_owners.items()):
        kind = type(owner)
        methods = {name: method for name, method in vars(inert).items() if not name.startswith("__")}
        owner.__class__ = types.new_class(f"Forked{kind.__name__}", (kind,), exec_body=partial(_fill, methods))
    _owners.clear()


def _fill(methods: dict[str, Any], namespace: dict[str, Any]) -> None:
    namespace.update(methods)


os.register_at_fork(after_in_child=_after_fork)
