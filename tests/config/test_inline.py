"""Stacks inside the dictionaries of other engines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tiering.config.inline import read_adapter, read_storage, read_tier
from tiering.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "guides"

STACK: Mapping[str, Any] = {
    "primary": {"capacity": "64MiB"},
    "secondary": [{"type": "memory", "capacity": "64MiB"}],
    "revision": "r1",
}


GUIDES: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "inside-vllms-offloading": read_tier,
    "sglang": read_storage,
    "lmcache": read_adapter,
}

REFUSED: Mapping[str, Any] = {
    "hints": {"release": False},
    "record_trace": {"path": "/x/trace"},
    "explain": {},
    "report_cached": True,
    "promote_waiting": {"primary": {"capacity": "64MiB", "promote_waiting": True}},
    "inclusion": {"primary": {"capacity": "64MiB", "inclusion": "exclusive"}},
    "layout": "canonical",
    "load_or_compute": {"secondary": [{"type": "memory", "capacity": "64MiB", "load_or_compute": "auto"}]},
    "mode": {"mode": "simple", "primary": {"capacity": "64MiB"}, "secondary": [], "revision": None},
    "events": True,
}
"""Words that all doors refuse, each with a value, or with the words around it."""

OF_ONE: Mapping[str, Mapping[str, Any]] = {
    "inside-vllms-offloading": {},
    "sglang": {"keep_secondary": True},
    "lmcache": {
        "keep_secondary": True,
        "reset_deadline": "1s",
        "min_prefix_blocks": {"secondary": [{"type": "memory", "capacity": "64MiB", "min_prefix_blocks": 2}]},
    },
}
"""Words that one door refuses."""


@pytest.mark.parametrize("guide", GUIDES)
def test_the_table_of_a_door_names_the_words_that_it_refuses(guide: str) -> None:
    """The words that it takes are not there as refused ones."""
    table = [line for line in (DOCS / f"{guide}.md").read_text().splitlines() if "Refused" in line]
    named = {word for line in table for word in re.findall(r"`([a-z_]+)", line.split("|")[1])}
    for word, value in {**REFUSED, **OF_ONE[guide]}.items():
        around = value if isinstance(value, dict) and {"primary", "secondary"} & value.keys() else {word: value}
        with pytest.raises(ConfigError, match=f"{word}: .*leave it out|{word}: .*write always or never"):
            GUIDES[guide]({**STACK, **around})
        assert named & {word, "simple" if word == "mode" else word}, word
    taken = {"keep_secondary", "reset_deadline", "min_prefix_blocks", "warm_start"} - OF_ONE[guide].keys()
    assert not named & taken


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
