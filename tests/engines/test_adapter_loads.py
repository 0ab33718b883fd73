"""The identities of LoRA adapters, around the loads of a worker's LoRA manager."""

from __future__ import annotations

import importlib
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiering.engines.vllm import adapter_loads
from tiering.engines.vllm.adapter_loads import UNREAD, AdapterLoads, is_private
from tiering.testing.clock import until

CONFIG = object()
OLD = 1_000_000_000 * 10**9
"""A time long ago, in nanoseconds since 1970."""


class Tensor:
    """A tensor that is mapped from a file."""

    device = SimpleNamespace(type="cpu")

    def is_pinned(self) -> bool:
        return False

    def clone(self) -> Copied:
        return Copied()


class Copied(Tensor):
    """A copy in memory."""


def layer(weights: Any) -> Any:
    return SimpleNamespace(lora_a=weights, lora_b=[weights, None], bias=None)


class Manager:
    """A LoRA manager like vLLM's: it reads the files of an adapter when it is told to."""

    def __init__(self, config: object = CONFIG) -> None:
        self.lora_config = config
        self.meanwhile: Callable[[], object] = lambda: None
        """A function to call in the middle of a load."""
        self.layers: Any = {"layer": layer(Tensor())}
        self.held: set[int] = set()
        """Numbers of the adapters that it holds."""

    def list_adapters(self) -> set[int]:
        return self.held

    def _load_adapter(self, lora_request: Any) -> Any:
        path = Path(lora_request.lora_path)
        content = (path / "adapter_model.safetensors").read_bytes() if path.is_dir() else b"downloaded"
        self.meanwhile()
        return SimpleNamespace(loras=self.layers, content=content)

    def load(self, path: object, name: str = "adapter", number: int = 1, **more: Any) -> Any:
        return self._load_adapter(SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), **more))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[AdapterLoads]:
    monkeypatch.setattr(Manager, "_load_adapter", Manager._load_adapter)  # observing replaces it
    observer = AdapterLoads(CONFIG)
    observer.observe([Manager])
    yield observer
    observer.close()


def write(directory: Path, weights: bytes, age: int = OLD) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    file = directory / "adapter_model.safetensors"
    file.write_bytes(weights)
    os.utime(file, ns=(age, age))
    return directory


def identity(loads: AdapterLoads, path: Path, manager: Manager | None = None) -> str:
    (manager or Manager()).load(path)
    return loads.take_news()["1 adapter"]


def test_a_load_is_reported_once_with_the_content_of_the_files(loads: AdapterLoads, tmp_path: Path) -> None:
    first, same, other = (write(tmp_path / str(n), text) for n, text in enumerate([b"first", b"first", b"other"]))
    found = identity(loads, first)
    assert loads.take_news() == {}
    assert identity(loads, same) == found != ""
    assert identity(loads, other) not in {found, ""}
    (first / "README.md").write_text("text")
    assert identity(loads, first) == found


def test_what_the_manager_loads_is_passed_on_and_other_engines_of_the_process_are_left_alone(
    loads: AdapterLoads, tmp_path: Path
) -> None:
    adapter = write(tmp_path / "adapter", b"first")
    assert Manager(object()).load(adapter).content == b"first"
    assert loads.take_news() == {}
    other = AdapterLoads(CONFIG)
    other.observe([Manager])  # a second engine does not wrap the method again
    assert Manager().load(adapter).content == b"first"
    assert loads.take_news() == other.take_news() != {}
    other.close()
    loads.close()
    Manager().load(adapter)
    assert loads.take_news() == {}


def in_place(file: Path) -> None:
    was = file.stat()
    file.write_bytes(b"other")
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))


def another_file(file: Path) -> None:
    new = file.with_name("new")
    new.write_bytes(b"other")
    os.utime(new, ns=(OLD, OLD))
    new.rename(file)


@pytest.mark.parametrize("replace", [in_place, another_file])
def test_files_that_change_while_they_are_loaded_are_known_by_their_load(
    loads: AdapterLoads, tmp_path: Path, replace: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    adapter = write(tmp_path / "adapter", b"first")
    manager = Manager()
    manager.meanwhile = lambda: replace(adapter / "adapter_model.safetensors")
    assert is_private(identity(loads, adapter, manager))
    assert "its requests use the CPU tier only until it is loaded again" in caplog.text
    manager.meanwhile = lambda: None
    assert identity(loads, adapter, manager) != ""


def test_an_adapter_whose_link_led_elsewhere_while_it_was_loaded_is_known_by_its_load(
    loads: AdapterLoads, tmp_path: Path
) -> None:
    adapter, link = write(tmp_path / "adapter", b"first"), tmp_path / "link"

    def point(to: Path) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(to)

    point(adapter)
    manager = Manager()
    assert identity(loads, link, manager) == identity(loads, adapter, manager)

    def elsewhere_and_back() -> None:
        point(tmp_path)
        point(adapter)

    manager.meanwhile = elsewhere_and_back
    assert is_private(identity(loads, link, manager))


@pytest.mark.parametrize("depth", [0, 1, 2], ids=["its own", "the one above", "the one of a link to it"])
def test_an_adapter_whose_directory_was_elsewhere_while_it_was_loaded_is_known_by_its_load(
    loads: AdapterLoads, tmp_path: Path, depth: int
) -> None:
    (tmp_path / "above").mkdir()
    adapter = write(tmp_path / "above" / "adapter", b"first")
    given = tmp_path / "links" / "adapter"
    given.parent.mkdir()
    given.symlink_to(adapter)
    moved = (adapter, adapter.parent, given.parent)[depth]
    manager = Manager()

    def beside() -> None:
        (tmp_path / "above" / "beside").mkdir()

    manager.meanwhile = beside
    assert identity(loads, given, manager) == identity(loads, write(tmp_path / "same", b"first"), Manager())

    def is_later() -> bool:
        (tmp_path / "probe").write_bytes(b"")
        return (tmp_path / "probe").stat().st_ctime_ns > moved.stat().st_ctime_ns

    assert until(is_later, 10.0)

    def elsewhere_and_back() -> None:
        moved.rename(tmp_path / "away")
        (tmp_path / "away").rename(moved)

    manager.meanwhile = elsewhere_and_back
    assert is_private(identity(loads, given, manager))


def test_files_that_change_without_a_trace_while_they_are_loaded_are_known_by_their_load(
    loads: AdapterLoads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the file system records the same for all content, as for writes through a mapping."""
    monkeypatch.setattr("tiering.engines.vllm.adapter_loads._recorded", lambda path: {"file": (1, 1, 5, OLD, OLD, 0)})
    adapter = write(tmp_path / "adapter", b"first")
    manager = Manager()
    manager.meanwhile = lambda: in_place(adapter / "adapter_model.safetensors")
    assert is_private(identity(loads, adapter, manager))


def test_a_loaded_adapter_is_copied_because_its_tensors_may_be_mapped_from_its_files(
    loads: AdapterLoads, tmp_path: Path
) -> None:
    manager = Manager()
    assert identity(loads, write(tmp_path / "adapter", b"first"), manager) != ""
    held = manager.layers["layer"]
    assert isinstance(held.lora_a, Copied)
    assert isinstance(held.lora_b[0], Copied)
    assert (held.lora_b[1], held.bias) == (None, None)


@pytest.mark.parametrize("layers", [{}, {"layer": layer(b"no tensor")}, None])
def test_an_adapter_that_cannot_be_copied_has_no_identity(loads: AdapterLoads, tmp_path: Path, layers: Any) -> None:
    manager = Manager()
    manager.layers = layers
    assert identity(loads, write(tmp_path / "adapter", b"first"), manager) == ""


def test_settings_that_change_what_an_adapter_computes_are_part_of_its_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Manager, "_load_adapter", Manager._load_adapter)
    adapter = write(tmp_path / "adapter", b"first")

    def found(request: dict[str, Any] | None = None, **words: Any) -> str:
        config = SimpleNamespace(max_loras=1, lora_dtype="float32", target_modules=None)
        vars(config).update(words)
        observer = AdapterLoads(config)
        observer.observe([Manager])
        Manager(config).load(adapter, **(request or {}))
        observer.close()
        return observer.take_news()["1 adapter"]

    assert found() == found(max_loras=4, max_cpu_loras=8) != ""
    others = [found(lora_dtype="bfloat16"), found(target_modules=["q_proj"]), found({"is_3d_lora_weight": True})]
    assert len({found(), *others}) == 4
    assert is_private(found({"tensorizer_config_dict": {"tensorizer_dir": "elsewhere"}}))


def test_files_that_a_process_may_write_through_a_mapping_are_known_by_their_load(
    loads: AdapterLoads, tmp_path: Path
) -> None:
    path = write(tmp_path / "adapter", b"one")
    with (path / "adapter_model.safetensors").open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert is_private(identity(loads, path))
    assert not is_private(identity(loads, path))


def test_an_adapter_without_files_is_known_by_its_load(loads: AdapterLoads, tmp_path: Path) -> None:
    assert is_private(identity(loads, tmp_path / "absent"))


def test_a_repository_of_the_hub_is_known_by_the_files_of_its_newest_snapshot(
    loads: AdapterLoads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = SimpleNamespace(HF_HUB_CACHE=str(tmp_path))
    monkeypatch.setattr(importlib, "import_module", {"huggingface_hub.constants": constants}.__getitem__)
    cache = tmp_path / "models--org--adapter"
    name = Path("org/adapter")
    assert is_private(identity(loads, name))

    def download(commit: str, weights: bytes) -> None:
        snapshot = cache / "snapshots" / commit
        snapshot.mkdir(parents=True)
        write(snapshot, weights)
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / "main").write_text(commit)

    manager = Manager()
    manager.meanwhile = lambda: download("a" * 40, b"first")
    found = identity(loads, name, manager)
    assert found != ""
    manager.meanwhile = lambda: None
    assert identity(loads, name, manager) == found
    manager.meanwhile = lambda: download("b" * 40, b"other")
    assert is_private(identity(loads, name, manager))
    manager.meanwhile = lambda: None
    assert identity(loads, name, manager) not in {found, ""}
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert is_private(identity(loads, name))
    monkeypatch.delenv("VLLM_USE_MODELSCOPE")
    shutil.rmtree(cache)

    def download_twice() -> None:
        download("a" * 40, b"first")  # by vLLM
        download("b" * 40, b"other")  # by another process

    manager.meanwhile = download_twice
    assert is_private(identity(loads, name, manager))


def test_blocks_of_another_adapter_than_the_held_one_are_stale(loads: AdapterLoads, tmp_path: Path) -> None:
    held = identity(loads, write(tmp_path / "adapter", b"first"))
    assert loads.check([("1 adapter", held, {1, 2})]) == set()
    assert loads.check([("1 adapter", "another", {1, 2}), ("2 absent", "any", {3})]) == {1, 2, 3}
    assert loads.take_news() == {}


def test_an_identity_that_is_asked_for_is_reported_again(loads: AdapterLoads, tmp_path: Path) -> None:
    held = identity(loads, write(tmp_path / "adapter", b"first"))
    assert loads.check([("1 adapter", "", set()), ("2 absent", "", set())]) == set()
    assert loads.take_news() == {"1 adapter": held, "2 absent": ""}


def test_two_loads_of_other_files_between_two_reports_have_no_identity(loads: AdapterLoads, tmp_path: Path) -> None:
    manager = Manager()
    for weights in (b"first", b"other"):
        manager.load(write(tmp_path / "adapter", weights))
    assert loads.take_news() == {"1 adapter": ""}


def test_adapters_of_one_name_are_told_apart_by_their_numbers(loads: AdapterLoads, tmp_path: Path) -> None:
    manager = Manager()
    for number, weights in [(1, b"first"), (2, b"other")]:
        manager.load(write(tmp_path / str(number), weights), number=number)
    news = loads.take_news()
    assert news.keys() == {"1 adapter", "2 adapter"}
    assert news["1 adapter"] != news["2 adapter"]
    assert loads.check([("1 adapter", news["2 adapter"], {1}), ("2 adapter", news["2 adapter"], {2})]) == {1}


@pytest.mark.parametrize("kind", [object, type("Other", (), {"_load_adapter": lambda self: None})])
def test_a_manager_of_another_form_is_not_observed_and_a_line_says_so(
    kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    AdapterLoads(CONFIG).observe([kind])
    assert "cannot be observed: their requests use no tier" in caplog.text


def test_adapters_that_were_not_used_for_long_are_dropped(
    loads: AdapterLoads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_loads, "MAX_ADAPTERS", 3)
    manager = Manager()
    path, held = write(tmp_path / "one", b"one"), ""
    for number in range(1, 7):
        manager.load(path, number=number)
        held = loads.take_news()[f"{number} adapter"]
        assert loads.check([("1 adapter", held, {7})]) == set(), "the first one is used in between"
    assert list(loads._held) == ["5", "6", "1"]
    assert loads.check([("2 adapter", held, {7})]) == {7}


def test_an_adapter_that_the_manager_holds_is_not_dropped_and_its_files_are_not_asked_again(
    loads: AdapterLoads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter that is pinned stays longer than any number of others is remembered."""
    monkeypatch.setattr(adapter_loads, "MAX_ADAPTERS", 3)
    manager, path = Manager(), write(tmp_path / "one", b"first")
    held = identity(loads, path, manager)
    manager.held = {1}
    for number in range(2, 9):
        manager.load(path, number=number)
    loads.take_news()
    write(path, b"other")
    loads.read({"1 adapter": (str(path), False)})
    assert loads.take_news() == {"1 adapter": held}
    assert loads.check([("1 adapter", held, {7})]) == set()
    assert list(loads._held) == ["6", "7", "8", "1"]


def test_a_number_that_is_used_for_two_names_stands_for_the_adapter_that_the_manager_holds(
    loads: AdapterLoads, tmp_path: Path
) -> None:
    """VLLM does not compare names and paths: it computes with what it holds of the number."""
    manager, first, second = Manager(), write(tmp_path / "one", b"first"), write(tmp_path / "two", b"second")
    manager.load(first, name="one")
    one = loads.take_news()["1 one"]
    loads.read({"1 two": (str(second), False)})
    assert loads.take_news() == {"1 two": one}
    assert loads.check([("1 two", one, {7})]) == set()
    manager.load(second, name="two")
    news = loads.take_news()
    assert news["1 one"] == news["1 two"] != one
    assert loads.check([("1 one", one, {7})]) == {7}


def test_each_load_of_unknown_files_is_another_identity_and_other_engines_have_others(tmp_path: Path) -> None:
    first, other = AdapterLoads(CONFIG, "engine"), AdapterLoads(CONFIG, "another")
    found: list[str] = []
    for loads in (first, first, other):
        loads.record("1 adapter", "")
        found += loads.take_news().values()
    assert len(set(found)) == 3
    assert all(map(is_private, found))


def read_news(loads: AdapterLoads, path: Path) -> dict[str, str]:
    """Let ``loads`` read the files of an adapter that is not loaded, and return the report."""
    loads.read({"1 adapter": (str(path), False)})
    news: dict[str, str] = {}

    def reported() -> bool:
        news.update(loads.take_news())
        return bool(news)

    until(reported)
    return news


def test_files_are_read_before_a_load_and_have_the_identity_that_the_load_will_have(
    loads: AdapterLoads, tmp_path: Path
) -> None:
    adapter = write(tmp_path / "adapter", b"first")
    read = read_news(loads, adapter)["1 adapter"]
    assert read == identity(loads, adapter)
    write(adapter, b"other")
    loads.read({"1 adapter": (str(adapter), False)})  # what is loaded counts
    assert loads.take_news() == {"1 adapter": read}


def test_files_that_cannot_be_read_before_a_load_are_reported_as_such(loads: AdapterLoads, tmp_path: Path) -> None:
    assert read_news(loads, tmp_path / "absent") == {"1 adapter": UNREAD}


def test_only_one_worker_of_an_engine_reads(tmp_path: Path) -> None:
    loads = AdapterLoads(CONFIG, reads=False)
    loads.read({"1 adapter": (str(tmp_path), False)})
    assert not any(thread.name.startswith("kv-tiering-adapter") for thread in threading.enumerate())


def test_files_that_no_thread_can_read_are_reported_as_not_read(loads: AdapterLoads, tmp_path: Path) -> None:
    loads.close()
    loads.read({"1 adapter": (str(write(tmp_path / "adapter", b"first")), False)})
    assert loads.take_news() == {"1 adapter": UNREAD}
