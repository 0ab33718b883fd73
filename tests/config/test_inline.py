"""Stacks inside the dictionaries of other engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tiering.config.inline import read_adapter, read_storage, read_tier
from tiering.errors import ConfigError

STACK: Mapping[str, Any] = {
    "primary": {"capacity": "64MiB"},
    "secondary": [{"type": "memory", "capacity": "64MiB"}],
    "revision": "r1",
}


@pytest.mark.parametrize("read", [read_tier, read_storage, read_adapter])
@pytest.mark.parametrize(("word", "value"), [("explain", {}), ("report_cached", True)])
def test_words_that_only_a_connector_honours_are_refused(
    read: Callable[[Mapping[str, Any]], object], word: str, value: object
) -> None:
    read(STACK)
    with pytest.raises(ConfigError, match=f"{word}: needs the TieringConnector, which sees the requests; leave it out"):
        read({**STACK, word: value})


def test_lmcaches_dictionary_needs_a_revision() -> None:
    with pytest.raises(ConfigError, match="revision: is missing: LMCache's keys have only the model's name"):
        read_adapter({word: value for word, value in STACK.items() if word != "revision"})
