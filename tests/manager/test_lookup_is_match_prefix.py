"""``lookup`` and ``match_prefix`` agree in every state of the manager.

Two managers go through the same random history; then one looks up a key, the other the prefix of that key alone. Both
must give the same answer and promote the same blocks from the same tier, or none.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manager_rig import ManagerRig
from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingManager
from tiering.api.request import ReqContext
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

KEYS = keys_of(*range(8))
ROWS = 6
WISHES: list[Any] = [
    None,
    {"kv_tiering": {"tiers": ["slow"]}},
    {"kv_tiering": {"tiers": []}},
    {"kv_tiering": {"load": False}},
    {"kv_tiering": {"store": False}},
    {"kv_tiering": {"lod": 1}},
    {"max_load_tokens": -1},
]

runs = st.tuples(st.integers(0, len(KEYS) - 1), st.integers(1, 4)).map(lambda run: KEYS[run[0] : run[0] + run[1]])
tiers = st.integers(0, 1)
asker = st.integers(0, 2)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), asker, runs),
        st.tuples(st.just("begin_store"), asker, runs),
        st.tuples(st.just("match"), asker, runs),
        st.tuples(st.just("hold"), tiers, runs),
        st.tuples(st.just("lose"), tiers, runs),
        st.tuples(st.just("not_known_yet"), tiers, runs),
        st.tuples(st.just("end_loads"), tiers, st.booleans()),
        st.tuples(st.just("end_step"), st.just(0), st.none()),
        st.tuples(st.just("time_passes"), st.just(0), st.sampled_from([1.0, 11.0])),
    ),
    max_size=14,
)


class Twin:
    """One of the two managers, its tiers, and its requests."""

    def __init__(self, least: tuple[int, int], wishes: list[Any]) -> None:
        self.tiers = [
            FakeTier("fast", min_prefix_blocks=least[0], load_deadline=10.0),
            FakeTier("slow", min_prefix_blocks=least[1], load_deadline=10.0),
        ]
        self.rig = ManagerRig(ROWS, self.tiers, promotion_share=0.7)
        self.asker = [ReqContext(f"asker{index}", wish) for index, wish in enumerate(wishes)]
        for ctx in self.asker:
            self.rig.manager.on_new_request(ctx)

    def apply(self, step: tuple[str, int, Any]) -> None:
        name, index, argument = step
        manager = self.rig.manager
        if name in ("store", "begin_store"):
            output = manager.prepare_store(argument, self.asker[index])
            if output is not None and output.keys_to_store and name == "store":
                manager.complete_store(output.keys_to_store, self.asker[index])
                for tier in self.tiers:
                    for job in list(tier.stores):
                        tier.finish(job, success=False)
        elif name == "match":
            manager.match_prefix(argument, self.asker[index])
        elif name == "hold":
            self.tiers[index].held.update(argument)
        elif name == "lose":
            self.tiers[index].held.difference_update(argument)
        elif name == "not_known_yet":
            self.tiers[index].unknown = set(argument) - self.tiers[index].held
        elif name == "end_loads":
            for job in list(self.tiers[index].loads):
                self.tiers[index].finish(job, success=argument)
        elif name == "end_step":
            self.rig.step()
        else:
            self.rig.clock.advance(argument)

    def state(self) -> object:
        """Return the state that a lookup may change."""
        self.rig.step()
        primary = self.rig.primary
        jobs = [(tier.name, list(job.keys), job.block_ids.tolist()) for tier in self.tiers for job in tier.loads]
        return sorted(primary.readable), sorted(primary.pending), jobs, self.rig.manager.get_stats()["manager"]


def answer_of(match: tuple[int, bool]) -> bool | None:
    hits, pending = match
    return None if pending else hits == 1


@settings(max_examples=300, deadline=None)
@given(
    least=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    wishes=st.lists(st.sampled_from(WISHES), min_size=3, max_size=3),
    history=steps,
    who=asker,
    key=st.sampled_from(KEYS),
)
def test_one_key(
    least: tuple[int, int], wishes: list[Any], history: list[tuple[str, int, Any]], who: int, key: OffloadKey
) -> None:
    asked, matched = Twin(least, wishes), Twin(least, wishes)
    for step in history:
        asked.apply(step)
        matched.apply(step)
    assert asked.rig.manager.lookup(key, asked.asker[who]) is answer_of(
        matched.rig.manager.match_prefix([key], matched.asker[who])
    )
    assert asked.state() == matched.state()


@settings(max_examples=200, deadline=None)
@given(wishes=st.lists(st.sampled_from(WISHES), min_size=3, max_size=3), history=steps, who=asker, keys=runs)
def test_a_prefix_is_its_keys_one_after_another(
    wishes: list[Any], history: list[tuple[str, int, Any]], who: int, keys: list[OffloadKey]
) -> None:
    """Holds without minimum run lengths and pending answers: a search stops at the first pending one."""
    singly, at_once = Twin((1, 1), wishes), Twin((1, 1), wishes)
    for step in history:
        if step[0] != "not_known_yet":
            singly.apply(step)
            at_once.apply(step)
    one_by_one = OffloadingManager.match_prefix(singly.rig.manager, keys, singly.asker[who])
    assert at_once.rig.manager.match_prefix(keys, at_once.asker[who]) == one_by_one
