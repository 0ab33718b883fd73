"""Requests with LoRA adapters: their blocks are named by the adapter's name, not by its content."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiering.engines.vllm.lora import LOOK_SECONDS, AdapterGuard, Files, files_of
from tiering.testing.clock import until

NOTHING = {"load": False, "store": False}


def request(lora_id: int | None, path: str = "/a", name: str = "adapter", params: Any = None, **more: Any) -> Any:
    lora = None if lora_id is None else SimpleNamespace(lora_name=name, lora_int_id=lora_id, lora_path=path, **more)
    return SimpleNamespace(request_id="r", lora_request=lora, kv_transfer_params=params, num_tokens=3)


def same_files(path: str) -> Files:
    return (("adapter_model.safetensors", 1),)


class Rig:
    """A guard, and a clock that stands still."""

    def __init__(self, *local_tiers: str, look: Any = same_files) -> None:
        self.now = 0.0
        self.guard = AdapterGuard(local_tiers, look, lambda: self.now)

    def admitted(self, asked: Any) -> Any:
        """Return the request as the scheduler half sees it, once the look at its adapter has ended."""
        admitted = self.guard.admit(asked)
        if admitted is None:
            look = self.guard.looking[asked.request_id]
            assert until(lambda: look.ended)
            admitted = self.guard.settle(asked)
        assert not self.guard.looking
        return admitted

    def policy(self, asked: Any) -> Any:
        return self.admitted(asked).kv_transfer_params["kv_tiering"]


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    """Rigs whose threads end with the test."""
    made: list[Rig] = []

    def one(*local_tiers: str, look: Any = same_files) -> Rig:
        made.append(Rig(*local_tiers, look=look))
        return made[-1]

    yield one
    for rig in made:
        rig.guard.shutdown()


def test_a_request_without_adapter_is_left_alone(make: Callable[..., Rig]) -> None:
    plain = request(None)
    assert make("memory").guard.admit(plain) is plain


def test_an_adapters_requests_use_no_tier_that_outlives_the_process(make: Callable[..., Rig]) -> None:
    rig = make("memory")
    assert rig.policy(request(1)) == {"tiers": ["memory"]}
    assert rig.policy(request(1, params={"kv_tiering": {"tiers": ["s3"]}})) == {"tiers": []}


def test_all_else_of_the_request_is_the_engines_own(make: Callable[..., Rig]) -> None:
    asked = request(1, params={"other": 1})
    admitted = make().admitted(asked)
    asked.num_tokens = 4
    assert (admitted.num_tokens, admitted.kv_transfer_params["other"]) == (4, 1)


@pytest.mark.parametrize("other", [request(2), request(1, "/b"), request(1, load_inplace=True)])
def test_a_name_that_has_stood_for_two_adapters_neither_loads_nor_stores(
    make: Callable[..., Rig], other: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()
    assert rig.policy(request(1)) == {"tiers": []}
    assert rig.policy(other) == NOTHING
    assert rig.policy(request(1)) == NOTHING
    assert rig.policy(request(3, name="another")) == {"tiers": []}
    assert len(caplog.records) == 1


def test_after_a_reset_a_name_may_be_used_again(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.policy(request(1))
    rig.policy(request(2))
    rig.guard.reset()
    assert rig.policy(request(2)) == {"tiers": []}


# ------------------------------------------------------------------------------------------------- files that change


def write(directory: Path, weights: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


def in_place(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    was = file.stat()
    file.write_bytes(b"second")
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns + 1))  # a clock's tick may be longer than this test


def another_file_of_the_same_age(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    was, new = file.stat(), adapter / "new"
    new.write_bytes(b"second")
    os.utime(new, ns=(was.st_atime_ns, was.st_mtime_ns))
    new.rename(file)


def another_directory(adapter: Path) -> None:
    write(adapter.with_name("other"), b"second")
    adapter.rename(adapter.with_name("old"))
    adapter.symlink_to(adapter.with_name("other"))


@pytest.mark.parametrize("replace", [in_place, another_file_of_the_same_age, another_directory])
def test_an_adapter_whose_files_were_replaced_uses_no_tier_until_a_reset(
    make: Callable[..., Rig], tmp_path: Path, replace: Any
) -> None:
    adapter = write(tmp_path / "adapter", b"first!")
    rig, asked = make("memory", look=files_of), request(1, str(adapter))
    for _ in range(2):
        assert rig.policy(asked) == {"tiers": ["memory"]}
    replace(adapter)
    for _ in range(2):
        assert rig.policy(asked) == NOTHING
    rig.guard.reset()
    assert rig.policy(asked) == {"tiers": ["memory"]}


def test_other_files_beside_an_adapter_s_do_not_count(tmp_path: Path) -> None:
    adapter = write(tmp_path / "adapter", b"first!")
    before = files_of(str(adapter))
    (adapter / "README.md").write_text("text")
    (adapter / "checkpoint-10").mkdir()
    assert files_of(str(adapter)) == before is not None


def test_an_adapter_without_files_uses_no_tier_and_one_line_says_so(
    make: Callable[..., Rig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig, asked = make("memory", look=files_of), request(1, str(tmp_path / "adapter"))
    for _ in range(2):
        assert rig.policy(asked) == NOTHING
    assert len(caplog.records) == 1
    write(tmp_path / "adapter", b"first!")
    assert rig.policy(asked) == {"tiers": ["memory"]}


def test_a_repository_of_the_hub_is_known_by_the_newest_commit_in_the_cache(
    make: Callable[..., Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = SimpleNamespace(HF_HUB_CACHE=str(tmp_path))
    monkeypatch.setattr(importlib, "import_module", {"huggingface_hub.constants": constants}.__getitem__)
    rig, asked = make("memory", look=files_of), request(1, "org/adapter")
    assert rig.policy(asked) == NOTHING
    main = tmp_path / "models--org--adapter" / "refs" / "main"
    main.parent.mkdir(parents=True)
    main.write_text("a" * 40)
    assert rig.policy(asked) == {"tiers": ["memory"]}
    main.write_text("b" * 40)
    assert rig.policy(asked) == NOTHING


class HungMedium:
    """A look at files that does not end before :meth:`go_on`."""

    def __init__(self) -> None:
        self._gate = threading.Event()
        self.go_on = self._gate.set

    def __call__(self, path: str) -> Files:
        self._gate.wait()
        return same_files(path)


@pytest.fixture
def hung() -> Iterator[HungMedium]:
    medium = HungMedium()
    yield medium
    medium.go_on()


def test_a_request_waits_for_the_look_at_its_adapter_but_not_for_ever(
    make: Callable[..., Rig], hung: HungMedium
) -> None:
    rig, asked = make("memory", look=hung), request(1)
    assert rig.guard.admit(asked) is None
    assert rig.guard.settle(asked) is None
    rig.now = LOOK_SECONDS
    assert rig.guard.settle(asked).kv_transfer_params["kv_tiering"] == NOTHING
    assert not rig.guard.looking


def test_a_request_that_cannot_wait_uses_no_tier(make: Callable[..., Rig], hung: HungMedium) -> None:
    rig, asked = make("memory", look=hung), request(1)
    assert rig.guard.admit(asked) is None
    assert rig.guard.settle(asked, wait=False).kv_transfer_params["kv_tiering"] == NOTHING
    hung.go_on()
    assert rig.policy(asked) == {"tiers": ["memory"]}


def test_after_the_shutdown_no_thread_looks_any_more(make: Callable[..., Rig]) -> None:
    rig = make("memory")
    rig.guard.shutdown()
    assert rig.policy(request(1)) == NOTHING
