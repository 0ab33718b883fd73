"""Hints: the same meaning from every carrier; what is malformed is ignored, and the rest stands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tiering.api.hints import MAX_ACTIONS, NO_HINTS, HintBounds, KeepAction, KeptBlocks, parse_hints
from tiering.api.request_policy import parse_request_policy


def params(**words: Any) -> dict[str, Any]:
    return {"kv_tiering": words}


def action(kind: object = "release", **payload: object) -> dict[str, object]:
    return {"action_type": kind, "payload": payload}


def envelope(*actions: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(actions=[SimpleNamespace(**fields) for fields in actions])


def session(name: str, salt: str | None = None) -> bytes:
    parsed = parse_hints(None, name, salt=salt).session
    assert parsed is not None
    return parsed


def test_a_request_without_hints_has_none() -> None:
    assert parse_hints(None) is NO_HINTS
    assert parse_hints({}) is NO_HINTS
    assert parse_hints(params(load=False)) is NO_HINTS


def test_the_engines_field_and_the_parameter_name_the_same_session() -> None:
    assert parse_hints(params(session_id="s")).session == session("s")
    assert parse_hints(params(session_id="s"), "another").session == session("s")


def test_sessions_of_different_salts_differ() -> None:
    assert len({session("s"), session("s", "tenant"), session("s", "other tenant"), session("t")}) == 4


@pytest.mark.parametrize("kind", ["release", "Release", "demote", "Demote"])
def test_a_release_ends_the_session_of_the_request_or_the_one_that_it_names(kind: str) -> None:
    own, named = (parse_hints(params(hints=[action(kind, **to)]), "s") for to in ({}, {"session_id": "t"}))
    assert (own.session, own.released) == (session("s"), (session("s"),))
    assert (named.session, named.released) == (session("s"), (session("t"),))


def test_the_engines_envelope_means_the_same_as_the_parameters() -> None:
    carried = parse_hints(None, "s", envelope(action(), action(session_id="t")))
    assert carried == parse_hints(params(hints=[action(), action(session_id="t")]), "s")


def test_actions_of_an_unknown_type_are_counted() -> None:
    assert parse_hints(params(hints=[action("teleport"), action()]), "s").unknown == 1


def test_actions_that_have_no_effect_in_the_stack_count_as_unknown() -> None:
    hints = parse_hints(params(hints=[action("pin", seconds=3), action()]), "s", allowed=frozenset({"release"}))
    assert (hints.unknown, hints.kept, hints.released) == (1, (), (session("s"),))


@pytest.mark.parametrize("kind", ["retain", "pin", "expect"])
def test_an_action_keeps_the_blocks_of_the_request_or_of_another_session_for_a_time(kind: str) -> None:
    assert parse_hints(params(hints=[action(kind.upper(), seconds=30)])).kept == (KeepAction(kind, None, 30.0),)
    named = [action(kind, seconds=1.5, session_id=name) for name in ("s", "t")]
    kept = parse_hints(params(hints=named), "s").kept
    assert kept == (KeepAction(kind, None, 1.5), KeepAction(kind, session("t"), 1.5))


def test_a_prefetch_is_of_the_prompt_or_of_the_session_that_it_names() -> None:
    """The request's own session is no exception, because clients name it in each request."""
    named = [action("prefetch", session_id=name) for name in ("s", "t")]
    hints = parse_hints(params(hints=[action("Prefetch"), *named]), "s", salt="tenant")
    assert hints.prefetched == (None, session("s", "tenant"), session("t", "tenant"))
    assert hints.tenant == parse_hints(None, "u", salt="tenant").tenant != parse_hints(None, "u").tenant


def test_the_bounds_of_the_stack_limit_what_is_kept() -> None:
    bounds = HintBounds(retain=0.25, pin=0.125, longest=60.0)
    keys = [b"one", b"two"]
    for action, bound in (
        (KeepAction("retain", None, 1e9), KeptBlocks(keys, 60.0, 0.25, False, b"t")),
        (KeepAction("pin", None, 5.0), KeptBlocks(keys, 5.0, 0.125, True, b"t")),
        (KeepAction("expect", None, 5.0), KeptBlocks(keys, 7.5, 0.25, False, b"t")),
    ):
        assert bounds.kept(action, keys, b"t") == [bound]


def test_only_an_expected_session_s_own_blocks_are_apart() -> None:
    bounds, keys, own = HintBounds(retain=0.25, pin=0.125), [b"one", b"two", b"three"], [b"two", b"three"]
    shared, mine = bounds.kept(KeepAction("expect", None, 5.0), keys, b"t", own)
    assert shared == KeptBlocks([b"one"], 7.5, 0.25, False, b"t")
    assert mine == KeptBlocks([b"two", b"three"], 7.5, 0.25, False, b"t", is_own=True)
    assert bounds.kept(KeepAction("expect", None, 5.0), keys[1:], b"t", own) == [mine]
    for name in ("retain", "pin"):
        assert [kept.is_own for kept in bounds.kept(KeepAction(name, None, 5.0), keys, b"t", own)] == [False]


def test_an_action_has_an_effect_only_if_its_bound_allows_it() -> None:
    assert HintBounds().actions == frozenset()
    assert HintBounds(blocks=1, retain=0.1, pin=0.1).actions == {"release", "retain", "pin", "expect"}
    assert HintBounds(release=False, blocks=1, retain=0.1, expect=False).actions == {"retain"}
    assert HintBounds(blocks=1, retain=0.0).actions == {"release"}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"hints": "release"}, "hints: is not a list of actions"),
        ({"hints": [7]}, "hints[0]: is not an action with action_type (a text) and payload (a mapping)"),
        ({"hints": [action(3)]}, "hints[0]: is not an action"),
        ({"hints": [{"action_type": "release", "payload": 3}]}, "hints[0]: is not an action"),
        ({"hints": [action(session_id="")]}, "hints[0].payload.session_id: '' is not a text of 1 to 256 bytes"),
        ({"hints": [action(session_id=4)]}, "hints[0].payload.session_id: 4 is not a text of 1 to 256 bytes"),
        ({"hints": [action()]}, "hints[0]: names no session, and the request has none"),
        ({"hints": [action("retain")]}, "hints[0].payload.seconds: None is not a number of seconds above 0"),
        ({"hints": [action("retain", seconds=True)]}, "hints[0].payload.seconds: True is not a number"),
        ({"hints": [action("pin", seconds=float("inf"))]}, "hints[0].payload.seconds: inf is not a number"),
        ({"hints": [action("expect", seconds=-1)]}, "hints[0].payload.seconds: -1 is not a number of seconds above 0"),
        ({"hints": [action("retain", seconds=1, session_id=4)]}, "hints[0].payload.session_id: 4 is not a text"),
        ({"session_id": "ä" * 129}, "is not a text of 1 to 256 bytes"),
    ],
)
def test_malformed_hints_are_ignored_and_named(words: dict[str, Any], reason: str) -> None:
    hints = parse_hints(params(**words))
    assert (hints.session, hints.released, hints.kept) == (None, (), ())
    assert len(hints.malformed) == 1
    assert reason in hints.malformed[0]
    assert parse_request_policy(params(load=True, **words)).load, "the rest of the parameters stands"


def test_actions_beyond_the_bound_are_ignored() -> None:
    hints = parse_hints(params(hints=[action(session_id=str(number)) for number in range(MAX_ACTIONS + 4)]))
    assert len(hints.released) == MAX_ACTIONS
    assert len(hints.malformed) == 1


def test_actions_beyond_the_bound_are_not_even_looked_at() -> None:
    """A request's list may be long, and it is read on the scheduler's thread."""

    class Unread(dict[str, Any]):
        def get(self, *names: object) -> Any:
            raise AssertionError(names)

    actions = [action(session_id=str(number)) for number in range(MAX_ACTIONS)]
    assert len(parse_hints(params(hints=[*actions, Unread()])).released) == MAX_ACTIONS


class Huge(str):
    """A text of megabytes that is not to be read on the scheduler's thread."""

    __slots__ = ()

    def encode(self, *how: str) -> bytes:
        raise AssertionError(how)

    def lower(self) -> str:
        raise AssertionError


def test_a_long_name_or_type_is_refused_by_its_length() -> None:
    name, kind = Huge("s" * (1 << 20)), Huge("release" * (1 << 17))
    hints = parse_hints(params(session_id=name, hints=[action(session_id=name), action(kind)]), salt="tenant")
    assert (hints.session, hints.released, len(hints.malformed), hints.unknown) == (None, (), 2, 1)


def test_an_object_that_is_no_envelope_is_malformed() -> None:
    assert list(parse_hints(None, "s", object()).malformed) == ["hints: is not a list of actions"]


@pytest.mark.parametrize("params", [np.arange(2), {"kv_tiering": np.arange(2)}])
def test_parameters_of_a_type_without_a_truth_have_no_hints(params: Any) -> None:
    assert parse_hints(params) is NO_HINTS
