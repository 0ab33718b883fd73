"""Routers that follow vLLM's events choose the engine that holds a prompt, also after a restart."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.routers import SALT, DynamoRouter, LlmdRouter, Prompt, Router
from tests.vllm.models import IMAGE, write_adapter, write_idefics
from tests.vllm.rig import BLOCK, Engine, prompt
from tests.vllm.test_events import CPU, DISK, GPU, WITH_ADAPTERS, Subscriber, publishing
from tests.vllm.test_model_kinds import picture

STACK: dict[str, Any] = {"primary": {"capacity": "16MiB"}, "self_describing_kv_events": True}
ROOM = {"num_gpu_blocks_override": 120}
SHARED = prompt(100)
"""The first prompt of engine a, which engine b computes as well."""
WEIGHTS = {"gpu": 1.0, "cpu": 0.8, "storage": 0.5}
"""llm-d's weights, with one for the medium of disks and buckets, which its own configuration lacks."""


def routers() -> list[Router]:
    return [LlmdRouter(BLOCK, WEIGHTS), DynamoRouter(BLOCK)]


@dataclass
class Fleet:
    """The events of all engines so far, and the prompts that each engine has computed.

    Attributes:
        heard: engine and event; an event None: the engine has ended.
        prompts: prompts by engine.
    """

    heard: list[tuple[str, Any]] = field(default_factory=list)
    prompts: dict[str, list[Prompt]] = field(default_factory=lambda: {"a": [], "b": []})

    def route(self, router: Router, change: Any = None, *, late: bool = False) -> Router:
        """Return ``router`` after all events, each as ``change`` makes it; ``late``: of engines that run only."""
        ended = [number for number, (_, event) in enumerate(self.heard) if event is None]
        gone = {self.heard[number][0] for number in ended} if late else set()
        for number, (engine, event) in enumerate(self.heard):
            if engine in gone and number < ended[-1]:
                continue
            if event is None:
                router.leave(engine)
            else:
                router.apply(engine, event if change is None else change(event))
        return router

    def wrong(self, router: Router, engines: str = "ab") -> list[tuple[str, int]]:
        """Return engine and number of the prompts for which the router chooses another engine."""
        return [
            (engine, number)
            for engine in engines
            for number, wanted in enumerate(self.prompts[engine])
            if router.best(wanted) != engine
        ]

    def take(self, engine: str, subscriber: Subscriber) -> None:
        self.heard += [(engine, event) for event in subscriber.heard]
        subscriber.heard.clear()


def computed(subscriber: Subscriber, start: int, lora: str | None = None) -> Prompt:
    """Return the prompt whose blocks vLLM's own cache has announced since event ``start``."""
    events = [event for event in subscriber.heard[start:] if getattr(event, "medium", None) == GPU]
    stored = [event for event in events if type(event).__name__ == "BlockStored"]
    tokens = [token for event in stored for token in event.token_ids]
    extra = [keys for event in stored for keys in event.extra_keys or [None] * len(event.block_hashes)]
    assert stored[0].parent_block_hash is None
    return Prompt(tokens, lora, extra)


def ask(fleet: Fleet, name: str, engine: Engine, subscriber: Subscriber, tokens: list[int], **how: Any) -> None:
    """Let an engine compute a prompt, and note it once all tiers have announced it."""
    start, lora = len(subscriber.heard), how.get("lora")
    if "session_id" in how:
        engine.finish(engine.start([tokens], 1, **how))
    else:
        engine.ask([tokens], 1, **how)
    engine.settle()
    subscriber.until(lambda: len(announced(subscriber, start, DISK)) >= len(tokens) // BLOCK)
    found = computed(subscriber, start, lora and lora.lora_name)
    fleet.prompts[name].append(found)


def announced(subscriber: Subscriber, start: int, medium: str) -> list[Any]:
    return [
        event
        for event in subscriber.heard[start:]
        if type(event).__name__ == "BlockStored" and event.medium == medium and event.token_ids
    ]


def all_kinds(fleet: Fleet, name: str, engine: Engine, subscriber: Subscriber, adapter: Path) -> None:
    """Ask for prompts of all kinds.

    The salted ones and those of adapters have the same tokens on all engines.
    """
    from vllm.lora.request import LoRARequest

    first = 100 * (1 + "ab".index(name))
    for seed in range(3):
        ask(fleet, name, engine, subscriber, prompt(first + seed))
    ask(fleet, name, engine, subscriber, prompt(7), salt=f"{SALT}tenant {name}")
    session = prompt(first + 10, 100)
    ask(fleet, name, engine, subscriber, session, session_id=f"chat {name}")
    turns = [event.session_id for medium in (CPU, DISK) for event in announced(subscriber, 0, medium)]
    assert turns.count(f"chat {name}") == 2 * (len(session) // BLOCK)
    lora = LoRARequest(f"parrot {name}", 1, str(adapter))
    engine.ask([prompt(first + 20)], 1, lora=lora)  # the first request of an adapter is stored in part or not at all
    engine.settle()
    ask(fleet, name, engine, subscriber, prompt(8), lora=lora)


@dataclass(frozen=True)
class World:
    """A fleet of two engines, as routers knew it before and after a restart of one, and after a reset."""

    before: Fleet
    after: Fleet
    reset: Fleet


@pytest.fixture(scope="module")
def world(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    places = {name: tmp_path_factory.mktemp(name) for name in "ab"}
    adapters = {name: write_adapter(places[name] / "adapter", number) for number, name in enumerate("ab")}
    options = {**WITH_ADAPTERS, **ROOM}
    fleet = Fleet()
    for name in "ab":
        with publishing(llama, places[name], options, **STACK) as (engine, subscriber):
            all_kinds(fleet, name, engine, subscriber, adapters[name])
            if name == "b":  # what engine a has on its disk, engine b has on its GPU
                engine.ask([SHARED], 1)
                engine.settle()
                subscriber.until(partial(shares, subscriber))
            fleet.take(name, subscriber)
    before = Fleet(list(fleet.heard), fleet.prompts)
    fleet.heard.append(("a", None))
    with publishing(llama, places["a"], options, **STACK) as (engine, subscriber):
        restored(engine, subscriber, fleet.prompts["a"])
        fleet.take("a", subscriber)
        after = Fleet(list(fleet.heard), fleet.prompts)
        reset(engine, subscriber)
        fleet.take("a", subscriber)
    return World(before, after, fleet)


def restored(engine: Engine, subscriber: Subscriber, prompts: list[Prompt]) -> None:
    """Let an engine without requests step until it has announced the prompts that its disk holds."""
    engine.settle()
    blocks = {tuple(told.tokens[at : at + BLOCK]) for told in prompts for at in range(0, len(told.tokens), BLOCK)}
    subscriber.until(lambda: blocks <= {tuple(event.token_ids) for event in announced(subscriber, 0, DISK)})


def reset(engine: Engine, subscriber: Subscriber) -> None:
    """Reset an engine with its tiers, and wait until it has announced that."""
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    engine.ask([prompt(1, 8)], 1)
    engine.settle()
    subscriber.until(lambda: any(type(event).__name__ == "BlockRemoved" for event in subscriber.heard))
    while subscriber.hears(500):
        pass


def shares(subscriber: Subscriber) -> bool:
    return any(list(event.token_ids[:BLOCK]) == SHARED[:BLOCK] for event in announced(subscriber, 0, DISK))


def test_the_right_engine_wins_for_every_prompt(world: World) -> None:
    for router in routers():
        world.before.route(router)
        # Engine b has computed the first prompt of engine a as well.
        assert world.before.wrong(router) == [("a", 0)]


def test_after_a_restart_the_engine_whose_disk_has_a_prompt_wins(world: World) -> None:
    for router in routers():
        world.after.route(router)
        assert world.after.wrong(router) == [("a", 0)]
        assert len(world.after.prompts["a"]) == 6


def test_a_block_that_only_a_disk_has_never_scores_like_the_gpus(world: World) -> None:
    for router in routers():
        scores = world.after.route(router).scores(world.after.prompts["a"][0])
        assert 0 < scores["a"] < scores["b"] * 0.6
        assert router.best(world.after.prompts["a"][0]) == "b"


def test_after_a_reset_the_other_engine_wins(world: World) -> None:
    for router in routers():
        world.reset.route(router)
        assert world.reset.wrong(router, "b") == []
        for wanted in world.reset.prompts["a"]:
            assert "a" not in router.scores(wanted)


class BlockStored(SimpleNamespace):
    """A stored event with other words."""


def changed(event: Any, **words: Any) -> Any:
    """Return a stored event with these words in place of its own."""
    return BlockStored(**{name: getattr(event, name) for name in event.__struct_fields__} | words)


def test_negative_control_of_events_without_tokens_and_parents_a_restarted_engine_is_never_chosen(world: World) -> None:
    def bare(event: Any) -> Any:
        if type(event).__name__ != "BlockStored" or event.medium == GPU:
            return event
        own = event.block_hashes[-1:]
        return changed(event, block_hashes=own, parent_block_hash=None, token_ids=[], block_size=0, extra_keys=None)

    for router in routers():
        assert world.after.wrong(world.after.route(router, late=True)) == [("a", 0)]
    for router in routers():
        world.after.route(router, bare, late=True)
        assert [name for name, _ in world.after.wrong(router)].count("a") == len(world.after.prompts["a"])


def test_negative_control_without_media_a_disk_scores_like_a_gpu(world: World) -> None:
    def anywhere(event: Any) -> Any:
        return changed(event, medium=None) if type(event).__name__ == "BlockStored" else event

    for router in routers():
        scores = world.after.route(router, anywhere).scores(world.after.prompts["a"][0])
        assert scores["a"] >= scores["b"]


def test_llmds_own_weights_count_a_disk_like_a_gpu(world: World) -> None:
    """The guide therefore gives it a weight for ``storage``."""
    scores = world.after.route(LlmdRouter(BLOCK, {"gpu": 1.0, "cpu": 0.8})).scores(world.after.prompts["a"][0])
    assert scores["a"] == scores["b"]


def test_the_engine_that_has_seen_a_picture_wins_before_and_after_a_restart_and_after_a_reset(tmp_path: Path) -> None:
    """The prompts have the same tokens."""
    model, fleet = write_idefics(tmp_path / "model"), Fleet()
    tokens, options = [IMAGE, *prompt(1)], {**ROOM, "skip_tokenizer_init": False}
    for name in "ab":
        (tmp_path / name).mkdir()
        with publishing(model, tmp_path / name, options, **STACK) as (engine, subscriber):
            ask(fleet, name, engine, subscriber, tokens, image=picture("ab".index(name)))
            fleet.take(name, subscriber)
    for router in routers():
        assert fleet.wrong(fleet.route(router)) == []
    fleet.heard.append(("a", None))
    with publishing(model, tmp_path / "a", options, **STACK) as (engine, subscriber):
        restored(engine, subscriber, fleet.prompts["a"])
        fleet.take("a", subscriber)
        restarted = Fleet(list(fleet.heard), fleet.prompts)
        reset(engine, subscriber)
        fleet.take("a", subscriber)
        forgotten = Fleet(list(fleet.heard), dict(fleet.prompts, a=list(fleet.prompts["a"])))
        ask(fleet, "a", engine, subscriber, tokens, image=picture(0))
        fleet.take("a", subscriber)
    for router in routers():
        assert restarted.wrong(restarted.route(router)) == []
    for router in routers():
        assert forgotten.wrong(forgotten.route(router), "b") == []
        assert "a" not in router.scores(forgotten.prompts["a"][0])
    for router in routers():
        assert fleet.wrong(fleet.route(router)) == []
    for prompts in fleet.prompts.values():
        assert all(any(each.extra) for each in prompts)
