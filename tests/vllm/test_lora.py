"""LoRA adapters behind the tiers: blocks are named by an adapter's content, and outlive the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.models import write_adapter
from tests.vllm.rig import BLOCK_BYTES, Answer, Engine, engine, prompt, whole_blocks, wrong

PROMPTS = [prompt(seed) for seed in range(3)]
ALL = whole_blocks(PROMPTS) * BLOCK_BYTES
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 4, "max_lora_rank": 8}


@dataclass(frozen=True, slots=True)
class Asked:
    """An adapter, and its request as vLLM's server would build it."""

    name: str
    number: int
    path: Path
    in_place: bool = False

    def request(self) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(self.name, self.number, str(self.path), load_inplace=self.in_place)


def ask(running: Engine, adapter: Asked | None, params: dict[str, Any] | None = None) -> list[Answer]:
    return running.ask(PROMPTS, params=params, lora=None if adapter is None else adapter.request())


def hold(running: Engine, adapter: Asked) -> None:
    """Let the worker load and report the adapter."""
    running.ask([PROMPTS[0][:8]], lora=adapter.request())


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Asked]:
    directory = tmp_path_factory.mktemp("adapters")
    first, second = write_adapter(directory / "one", 1), write_adapter(directory / "two", 2)
    return {"one": Asked("one", 1, first), "two": Asked("two", 2, second), "new one": Asked("one", 3, second)}


@pytest.fixture(scope="module")
def expected(llama: Path, adapters: dict[str, Asked]) -> dict[str, list[Answer]]:
    with engine(llama, None, enable_prefix_caching=False, **OPTIONS) as plain:
        return {"base": ask(plain, None), "one": ask(plain, adapters["one"]), "two": ask(plain, adapters["two"])}


@pytest.fixture(scope="module")
def tiered(
    llama: Path,
    adapters: dict[str, Asked],
    expected: dict[str, list[Answer]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    disk = {"type": "local", "path": str(tmp_path_factory.mktemp("lora")), "capacity": "64MiB"}
    with engine(llama, {"primary": {"capacity": "64MiB"}, "secondary": [disk]}, **OPTIONS) as running:
        for name in ("one", "two"):
            answers = ask(running, adapters[name], {"kv_tiering": {"load": False, "store": False}})
            if wrong(answers, expected[name]):
                # Seen once on a busy machine: an engine computed other answers for all adapters from the start.
                pytest.skip("without any tier, two engines of this vLLM give different answers for one adapter")
            running.llm.reset_prefix_cache()
        yield running


def test_adapters_change_the_answers(expected: dict[str, list[Answer]]) -> None:
    for first, second in [("base", "one"), ("base", "two"), ("one", "two")]:
        assert wrong(expected[first], expected[second]) == [0, 1, 2]


def test_kv_of_the_base_model_and_of_adapters_is_never_mixed(
    tiered: Engine, adapters: dict[str, Asked], expected: dict[str, list[Answer]]
) -> None:
    blocks = 0
    for name, adapter in [("base", None), ("one", adapters["one"]), ("two", adapters["two"])]:
        answers, loaded = tiered.loaded(partial(ask, tiered, adapter))
        assert wrong(answers, expected[name]) == []
        assert loaded == 0
        tiered.settle()
        blocks += whole_blocks(PROMPTS)
        assert tiered.tier("local")["blocks"] == blocks
        tiered.evict()


@pytest.mark.parametrize("name", ["one", "two"])
def test_kv_of_an_adapter_comes_back_from_the_cpu_tier(
    tiered: Engine, adapters: dict[str, Asked], expected: dict[str, list[Answer]], name: str
) -> None:
    ask(tiered, adapters[name])
    tiered.evict()
    answers, loaded = tiered.loaded(lambda: ask(tiered, adapters[name]))
    assert wrong(answers, expected[name]) == []
    assert loaded == ALL


def test_another_adapter_under_a_name_that_was_used_gets_nothing_of_the_first_ones_kv(
    tiered: Engine, adapters: dict[str, Asked], expected: dict[str, list[Answer]]
) -> None:
    ask(tiered, adapters["one"])
    tiered.evict()
    assert tiered.llm.llm_engine.remove_lora(adapters["one"].number)
    answers, loaded = tiered.loaded(lambda: ask(tiered, adapters["new one"]))
    assert wrong(answers, expected["two"]) == []
    assert loaded == 0


def test_an_adapter_loaded_in_the_place_of_another_gets_nothing_of_its_kv(
    tiered: Engine, expected: dict[str, list[Answer]], tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "changing", 1)
    before, after = Asked("changing", 4, path), Asked("changing", 4, path, in_place=True)
    hold(tiered, before)
    assert wrong(ask(tiered, before), expected["one"]) == []
    tiered.evict()
    write_adapter(path, 2)
    # vLLM's hashes of its blocks are those of the first adapter. The first loads are ordered before the worker reads.
    for adapter, ordered in ((after, ALL), (before, 0), (before, ALL)):
        answers, loaded = tiered.loaded(partial(ask, tiered, adapter))
        assert (wrong(answers, expected["two"]), loaded) == ([], ordered)
        tiered.evict()


def test_an_adapter_that_vllm_reads_again_from_other_files_gets_nothing_of_the_first_ones_kv(
    tiered: Engine, expected: dict[str, list[Answer]], tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "trained", 1)
    adapter = Asked("trained", 5, path)
    hold(tiered, adapter)
    assert wrong(ask(tiered, adapter), expected["one"]) == []
    tiered.evict()
    answers, loaded = tiered.loaded(lambda: ask(tiered, adapter))
    assert (wrong(answers, expected["one"]), loaded) == ([], ALL)
    tiered.evict()
    write_adapter(path, 2)
    assert tiered.llm.llm_engine.remove_lora(adapter.number)  # as vLLM does by itself beyond max_cpu_loras adapters
    for ordered in (ALL, 0, ALL):  # the first loads are ordered before the worker reads the new files
        answers, loaded = tiered.loaded(lambda: ask(tiered, adapter))
        assert (wrong(answers, expected["two"]), loaded) == ([], ordered)
        tiered.evict()


def test_files_that_change_between_an_adapter_s_loading_and_its_first_request_give_no_wrong_answer(
    tiered: Engine, expected: dict[str, list[Answer]], tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "early", 1)
    adapter = Asked("early", 6, path)
    assert tiered.llm.llm_engine.add_lora(adapter.request())
    write_adapter(path, 2)
    for _ in range(2):
        assert wrong(ask(tiered, adapter), expected["one"]) == []
        tiered.evict()
    assert tiered.llm.llm_engine.remove_lora(adapter.number)
    for _ in range(2):
        assert wrong(ask(tiered, adapter), expected["two"]) == []
        tiered.evict()
    answers, loaded = tiered.loaded(lambda: ask(tiered, adapter))
    assert (wrong(answers, expected["two"]), loaded) == ([], ALL)


def test_a_file_that_is_written_in_place_does_not_change_the_adapter_that_the_worker_holds(
    tiered: Engine, adapters: dict[str, Asked], expected: dict[str, list[Answer]], tmp_path: Path
) -> None:
    """vLLM maps the file, and copies its pages each time that it activates the adapter again."""
    adapter = Asked("mapped", 10, write_adapter(tmp_path / "mapped", 1))
    hold(tiered, adapter)
    hold(tiered, adapters["two"])  # there is one slot
    file = adapter.path / "adapter_model.safetensors"
    with file.open("r+b") as opened:
        opened.write((adapters["two"].path / file.name).read_bytes())
    for _ in range(2):
        assert wrong(ask(tiered, adapter), expected["one"]) == []
        tiered.evict()


def test_files_that_are_replaced_before_a_reset_need_no_second_one(
    tiered: Engine, expected: dict[str, list[Answer]], tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "next", 1)
    adapter = Asked("next", 7, path)
    hold(tiered, adapter)
    assert wrong(ask(tiered, adapter), expected["one"]) == []
    write_adapter(path, 2)
    assert tiered.llm.llm_engine.remove_lora(adapter.number)
    assert tiered.llm.reset_prefix_cache(reset_connector=True)
    hold(tiered, adapter)
    for loaded in (0, ALL):
        answers, found = tiered.loaded(lambda: ask(tiered, adapter))
        assert (wrong(answers, expected["two"]), found) == ([], loaded)
        tiered.evict()


def test_an_adapter_is_not_taken_for_another_one_of_its_name_that_the_worker_holds_too(
    tiered: Engine, expected: dict[str, list[Answer]], tmp_path: Path
) -> None:
    first = Asked("twice", 8, write_adapter(tmp_path / "first", 1))
    for adapter in (first, Asked("twice", 9, write_adapter(tmp_path / "second", 2))):
        hold(tiered, adapter)
    tiered.evict()
    assert tiered.llm.reset_prefix_cache(reset_connector=True)
    hold(tiered, first)
    assert wrong(ask(tiered, first), expected["one"]) == []
    tiered.evict()
    write_adapter(first.path, 2)
    assert tiered.llm.llm_engine.remove_lora(first.number)
    for _ in range(2):
        assert wrong(ask(tiered, first), expected["two"]) == []
        tiered.evict()


def test_an_adapter_whose_files_are_not_known_uses_the_cpu_tier_only(
    tiered: Engine, expected: dict[str, list[Answer]], tmp_path: Path
) -> None:
    """A process that has a file open for writing may change it while it is loaded."""
    adapter = Asked("open", 11, write_adapter(tmp_path / "open", 1))
    with (adapter.path / "adapter_model.safetensors").open("r+b"):
        hold(tiered, adapter)
        tiered.settle()
        blocks = tiered.tier("local")["blocks"]
        for ordered in (0, ALL):
            answers, loaded = tiered.loaded(lambda: ask(tiered, adapter))
            assert (wrong(answers, expected["one"]), loaded) == ([], ordered)
            tiered.evict()
        assert tiered.tier("local")["blocks"] == blocks
        # The same name and number, loaded again.
        assert tiered.llm.llm_engine.remove_lora(adapter.number)
        write_adapter(adapter.path, 2)
        with (adapter.path / "adapter_model.safetensors").open("r+b"):
            for _ in range(3):
                assert wrong(ask(tiered, adapter), expected["two"]) == []
                tiered.evict()
    assert tiered.tier("local")["blocks"] == blocks
