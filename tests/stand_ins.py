"""Stand-ins for packages that are not installed: modules under their names, for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


def module(name: str, **content: Any) -> ModuleType:
    """Return a module, which may have modules inside."""
    made = ModuleType(name)
    vars(made).update(content)
    made.__path__ = []
    return made


@contextmanager
def standing_in(modules: Iterable[ModuleType], user: str) -> Iterator[None]:
    """Install modules for a while; the module ``user``, which imports them, is imported anew in it."""
    made = {one.__name__: one for one in modules}
    before = {name: sys.modules.get(name) for name in (*made, user)}
    sys.modules.update(made)
    for name, one in made.items():
        parent, _, last = name.rpartition(".")
        if parent in made:
            setattr(made[parent], last, one)
    sys.modules.pop(user, None)
    try:
        yield
    finally:
        for name, earlier in before.items():
            sys.modules.pop(name, None)
            if earlier is not None:
                sys.modules[name] = earlier
