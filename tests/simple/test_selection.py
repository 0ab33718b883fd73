"""The selection of the simple mode, and the options that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiering
from tiering.errors import ConfigError
from tiering.simple.selection import SimpleOptions, simple_options

PRIMARY = {"capacity": "1MiB"}


def stack_file(path: Path, text: str) -> str:
    file = path / "stack.yaml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    "extra",
    [
        {"mode": "simple", "lazy_offload": True, "primary": PRIMARY},
        {"config": {"mode": "simple", "lazy_offload": True, "primary": PRIMARY}},
        {"config": {"primary": PRIMARY}, "mode": "simple", "lazy_offload": True},
        {"config": {"mode": "simple", "primary": PRIMARY, "secondary": []}, "lazy_offload": True},
    ],
)
def test_stack_and_extra_configuration_can_both_choose_it(extra: dict[str, Any]) -> None:
    assert simple_options(extra) == SimpleOptions(1 << 20, True, False)


def test_a_stack_file_can_choose_it(tmp_path: Path) -> None:
    file = stack_file(tmp_path, "mode: simple\nevents: true\nprimary: {capacity: 2MiB}\n")
    assert simple_options({"config": file}) == SimpleOptions(2 << 20, False, True)
    assert simple_options({"config": file, "lazy_offload": True}) == SimpleOptions(2 << 20, True, True)
    assert simple_options({"config": file, "mode": "tiering"}) is None


def test_the_capacity_is_that_of_all_workers() -> None:
    assert simple_options({"mode": "simple", "primary": PRIMARY}, world_size=4) == SimpleOptions(1 << 18, False, False)


def test_events_can_be_asked_to_describe_themselves() -> None:
    chosen = simple_options(
        {"config": {"mode": "simple", "events": True, "primary": PRIMARY}, "self_describing_kv_events": True}
    )
    assert chosen == SimpleOptions(1 << 20, False, True, True)


@pytest.mark.parametrize(
    "extra",
    [{}, {"primary": PRIMARY}, {"config": {"primary": PRIMARY}}, {"config": {"mode": "tiering", "primary": PRIMARY}}],
)
def test_otherwise_it_is_the_tiering_mode(extra: dict[str, Any]) -> None:
    assert simple_options(extra) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"secondary": [{"type": "memory", "capacity": "1MiB"}]}, r"secondary\[0\].*no secondary tiers"),
        ({"keep_secondary": True}, "keep_secondary.*no meaning"),
        ({"primary": {"capacity": "1MiB", "eviction": "arc"}}, "primary.eviction.*no meaning"),
        ({"lazy_offload": "sometimes"}, "lazy_offload"),
        ({"mode": "simpler"}, "mode.*simple"),
        ({"block_size": 64}, "block_size.*no meaning"),
        ({"offload_prompt_only": True}, "offload_prompt_only.*no meaning"),
        ({"self_describing_kv_events": "yes"}, "self_describing_kv_events.*not true or false"),
        ({"nonsense": 1}, "nonsense.*unknown"),
    ],
)
def test_what_it_cannot_do_is_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        simple_options({"mode": "simple", "primary": PRIMARY, **words})


def test_lazy_offloading_is_for_the_simple_mode() -> None:
    with pytest.raises(ConfigError, match="lazy_offload"):
        tiering.load_stack({"primary": PRIMARY, "lazy_offload": True})


def test_a_simple_stack_has_no_manager_of_tiers() -> None:
    stack = tiering.load_stack({"mode": "simple", "primary": PRIMARY})
    model = tiering.ModelIdentity(name="m", weights="w", dtype="bfloat16", layout="l")
    with pytest.raises(ConfigError, match=r"mode.*simple"):
        tiering.open_manager(stack, block_bytes=4096, model=model)
