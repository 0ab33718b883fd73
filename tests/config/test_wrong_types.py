"""Arguments and values of a wrong type raise typed errors; numbers and paths are read as written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiering
from tiering.api.namespace import revision_digest
from tiering.block_tier.definition import TierDefinition

MODEL = tiering.ModelIdentity(name="org/model", weights="0" * 40, dtype="bfloat16", layout="types")
PRIMARY = {"capacity": "1MiB"}


class NoOptions(tiering.TierOptions):
    """The options of a tier whose build function forgets to return it."""


NO_TIER = TierDefinition(NoOptions, lambda options, context: None, persistent=False)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("stack", [{"primary": PRIMARY}, Path("stack.yaml"), None])
def test_a_stack_that_was_not_loaded_is_refused(stack: Any) -> None:
    with pytest.raises(tiering.ConfigError, match=r"stack: is a .*load_stack"):
        tiering.open_manager(stack, 4096, MODEL)


@pytest.mark.parametrize("model", [None, "org/model"])
def test_a_model_that_is_no_identity_is_refused(model: Any) -> None:
    with pytest.raises(tiering.ConfigError, match=r"model: is a .*ModelIdentity"):
        tiering.open_manager(tiering.load_stack({"primary": PRIMARY}), 4096, model)


def test_a_build_function_that_returns_no_tier_is_refused() -> None:
    stack = tiering.load_stack({"primary": PRIMARY, "secondary": [{"type": f"{__name__}:NO_TIER"}]})
    with pytest.raises(tiering.ConfigError, match="returned a NoneType, not a tier"):
        tiering.open_manager(stack, 4096, MODEL)


def test_a_revision_that_is_no_text_is_refused() -> None:
    with pytest.raises(tiering.ConfigError, match="no UTF-8 text"):
        revision_digest("\ud800")


@pytest.mark.parametrize("path", ["file:///var/kv", "s3://bucket/kv", "%HOME%/kv"])
def test_a_path_that_would_be_taken_for_a_name_is_refused(path: str) -> None:
    with pytest.raises(tiering.ConfigError, match="would not be expanded"):
        tiering.load_stack({"primary": PRIMARY, "secondary": [{"type": "local", "path": path, "capacity": "1MiB"}]})


def test_the_error_of_a_required_tier_has_the_reason_and_the_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    section = {"type": "local", "path": str(tmp_path / "file" / "kv"), "capacity": "1MiB", "required": True}
    stack = tiering.load_stack({"primary": PRIMARY, "secondary": [section]})
    with pytest.raises(tiering.TierUnavailableError, match="could not be opened now: cannot create") as caught:
        tiering.open_manager(stack, 4096, MODEL)
    assert isinstance(caught.value.__cause__, tiering.StoreError)


def test_numbers_are_read_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text("primary: {capacity: 010000000}\n")
    assert tiering.load_stack(file).primary.capacity == 10_000_000
    file.write_text("primary: {capacity: 1:30:00}\n")
    with pytest.raises(tiering.ConfigError, match="is not a size"):
        tiering.load_stack(file)
