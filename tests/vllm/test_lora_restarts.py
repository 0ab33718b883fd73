"""LoRA adapters and tiers that outlive the engine: blocks are named by an adapter's content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.models import write_adapter
from tests.vllm.rig import Answer, engine, wrong
from tests.vllm.test_lora import ALL, OPTIONS, Asked, ask, hold
from tiering.connector.variants import Variant
from tiering.engines.vllm.adapter_loads import AdapterLoads
from tiering.engines.vllm.lora import AdapterNames


@pytest.fixture(scope="module")
def expected(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    directory = tmp_path_factory.mktemp("adapters")
    with engine(llama, None, enable_prefix_caching=False, **OPTIONS) as plain:
        return {
            name: ask(plain, Asked(name, number, write_adapter(directory / name, number)))
            for number, name in enumerate(("one", "two"), 1)
        }


@pytest.mark.parametrize("named", [True, False], ids=["named by content", "named as vLLM hashes"])
def test_an_adapter_s_kv_comes_back_from_the_disk_after_a_restart_and_another_adapter_of_its_name_gets_none(
    llama: Path,
    expected: dict[str, list[Answer]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: bool,
) -> None:
    """Without the adapter's content in the names of blocks, answers are wrong, and the test sees them."""
    if not named:
        monkeypatch.setattr(Variant, "names_of", lambda self, hashes: hashes if self.identity else ())
    path = write_adapter(tmp_path / "adapter", 1)
    disk = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    stack = {"primary": {"capacity": "64MiB"}, "secondary": [disk]}
    with engine(llama, stack, **OPTIONS) as first:
        adapter = Asked("parrot", 1, path)
        assert wrong(ask(first, adapter), expected["one"]) == []
        first.settle()
    with engine(llama, stack, **OPTIONS) as second:
        adapter = Asked("parrot", 2, path)  # the number is not part of the identity
        answers, loaded = second.loaded(lambda: ask(second, adapter))
        assert (wrong(answers, expected["one"]), loaded) == ([], ALL)
        assert second.tier("local")["read_bytes"] >= loaded
        # Another adapter under the same name and path, in the same engine.
        write_adapter(path, 2)
        assert second.llm.llm_engine.remove_lora(adapter.number)
        adapter = Asked("parrot", 3, path)
        second.evict()
        answers, loaded = second.loaded(lambda: ask(second, adapter))
        assert (wrong(answers, expected["two"]) == [], loaded == 0) == (named, named)
        second.evict()
        answers, loaded = second.loaded(lambda: ask(second, adapter))
        assert (wrong(answers, expected["two"]) == [], loaded) == (named, ALL)
        second.settle()
    write_adapter(path, 1)
    with engine(llama, stack, **OPTIONS) as third:
        adapter = Asked("parrot", 1, path)
        answers, loaded = third.loaded(lambda: ask(third, adapter))
        assert (wrong(answers, expected["one"]), loaded) == ([], ALL)
    if named:
        write_adapter(path, 3)
        with engine(llama, stack, **OPTIONS) as fourth:
            adapter = Asked("parrot", 1, path)
            assert fourth.loaded(lambda: ask(fourth, adapter))[1] == 0


@pytest.mark.parametrize("early", [True, False], ids=["read before the load", "read by the load alone"])
def test_files_that_change_after_they_were_read_give_no_wrong_answer(
    llama: Path, expected: dict[str, list[Answer]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """The first requests load KV of the files that were read; the load then reads other files.

    Without the early reading, the requests of the first step load nothing.
    """
    path = write_adapter(tmp_path / "adapter", 1)
    disk = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    stack = {"primary": {"capacity": "64MiB"}, "secondary": [disk]}
    with engine(llama, stack, **OPTIONS) as first:
        assert wrong(ask(first, Asked("parrot", 1, path)), expected["one"]) == []
        first.settle()
    take_news = AdapterLoads.take_news

    def then_changed(loads: AdapterLoads) -> dict[str, str]:
        if news := take_news(loads):
            monkeypatch.undo()
            write_adapter(path, 2)
        return news

    if early:
        monkeypatch.setattr(AdapterLoads, "take_news", then_changed)
    else:
        monkeypatch.setattr(AdapterLoads, "read", lambda loads, adapters: None)
    with engine(llama, stack, **OPTIONS) as second:
        answers, loaded = second.loaded(lambda: ask(second, Asked("parrot", 1, path)))
        assert (wrong(answers, expected["two" if early else "one"]), loaded == ALL) == ([], early)


def follow(names: AdapterNames, named: Any) -> None:
    """Let a name stand for the adapter that the workers hold now, and keep its older blocks."""
    named.identity = names._held.get(named.key)


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
def test_mode_simple_gives_no_kv_of_an_adapter_to_one_that_was_loaded_in_its_place(
    llama: Path,
    expected: dict[str, list[Answer]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    guarded: bool,
) -> None:
    """Without the guard, answers are wrong, and the test sees them."""
    if not guarded:
        monkeypatch.setattr(AdapterNames, "_confused", follow)
    path = write_adapter(tmp_path / "adapter", 1)
    before, after = Asked("parrot", 1, path), Asked("parrot", 1, path, in_place=True)
    with engine(llama, {"mode": "simple", "primary": {"capacity": "64MiB"}}, **OPTIONS) as running:
        hold(running, before)
        for ordered in (0, ALL):
            answers, loaded = running.loaded(lambda: ask(running, before))
            assert (wrong(answers, expected["one"]), loaded) == ([], ordered)
            running.evict()
        write_adapter(path, 2)
        answers = []
        for adapter in (after, before, before):
            answers += ask(running, adapter)
            running.evict()
        assert (wrong(answers, expected["two"] * 3) == []) == guarded
        assert running.llm.reset_prefix_cache(reset_connector=True)
        hold(running, before)
        for ordered in (0, ALL):
            answers, loaded = running.loaded(lambda: ask(running, before))
            assert (wrong(answers, expected["two"]), loaded) == ([], ordered)
            running.evict()
