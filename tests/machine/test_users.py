"""Users that a stack of a service names: each has its own blocks, and finds nothing of the others."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.runner import kv_tiering
from tests.machine.hosts import ServiceProcess, service_in_thread, stack_of
from tests.machine.users import (
    ANNA,
    BERT,
    CARL,
    Held,
    UserProcess,
    claim,
    close,
    end_claim,
    forget_rows,
    inherited,
    knock,
    knocks,
    load,
    needs_root,
    open_others,
    present,
    reset,
    rows_in_use,
    serving,
    start_engine,
    store,
    write_claimed,
)
from tiering import ModelIdentity, load_stack, open_manager
from tiering.api.namespace import Namespace
from tiering.cli.serve import users_of
from tiering.config.io_process import builders
from tiering.errors import ConfigError
from tiering.machine.claim import describe
from tiering.machine.counts import ServiceCounts
from tiering.machine.messages import MessageError
from tiering.machine.service import MOST_CONNECTIONS, MachineService
from tiering.machine.user_names import number_of
from tiering.machine.users import UserThread, look_at, parameters_of, service_for
from tiering.machine.words import Greeting

BLOCKS = range(8)
TIERS = ("peers", "memory", "local")


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yield a directory that other users may enter; those of pytest are private."""
    with tempfile.TemporaryDirectory(prefix="kv-users-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def user() -> Iterator[Callable[..., UserProcess]]:
    made: list[UserProcess] = []

    def make(number: int, **words: int) -> UserProcess:
        made.append(UserProcess(number, **words))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def service(directory: Path) -> Iterator[ServiceProcess]:
    tiers = (
        {"type": "memory", "capacity": "16MiB"},
        {"type": "local", "path": str(directory / "disk"), "capacity": "16MiB", "fill": "all"},
    )
    running = ServiceProcess(directory, stack_of(*tiers, users=[ANNA, str(BERT)]))
    try:
        yield running.wait_for_socket()
    finally:
        if running.process.poll() is None:
            running.kill()
        running.process.wait()


# ---------------------------------------------------------------------------------------------------- what others find


@needs_root
def test_users_find_their_own_blocks_and_none_of_the_others(
    service: ServiceProcess, user: Callable[..., UserProcess], directory: Path
) -> None:
    anna, second, bert, root = user(ANNA), user(ANNA), user(BERT), user(0)
    for weights, one in enumerate((anna, second, bert, root)):
        assert one.do(start_engine, service.socket, TIERS, 1 if one is second else weights + 1) == [True] * 3
    assert anna.do(store, BLOCKS)
    assert second.do(load, BLOCKS) == ([*BLOCKS], [])
    for other in (bert, root):
        assert other.do(load, BLOCKS) == ([], [])
        assert [other.do(present, tier, BLOCKS) for tier in range(3)] == [[]] * 3
    assert second.do(present, 1, BLOCKS) == second.do(present, 2, BLOCKS) == [*BLOCKS]
    assert bert.do(store, BLOCKS)
    assert root.do(store, BLOCKS)
    for one in (anna, second, bert, root):
        one.do(forget_rows)
        assert one.do(load, BLOCKS) == ([*BLOCKS], []), "bytes of another user's engine"
    assert bert.do(reset, "step-1")
    for one in (anna, root):
        one.do(forget_rows, 20_000)
        assert one.do(load, BLOCKS) == ([*BLOCKS], []), "a reset of another user"
    for one in (anna, second, bert, root):
        one.do(close)
    assert service.end() == 0
    names = [path.name.removeprefix("replica-") for path in (directory / "disk").glob("replica-*")]
    held = [kv_tiering("inspect", directory / "service.yaml", "--replica", name).out for name in names]
    assert len(names) == 3
    assert [f"user {ANNA}" in out for out in held].count(True) == 1


@needs_root
def test_rows_of_an_engine_that_was_killed_go_to_its_user_alone(
    service: ServiceProcess, user: Callable[..., UserProcess]
) -> None:
    anna, bert, again = user(ANNA), user(BERT), user(ANNA)
    assert anna.do(start_engine, service.socket, TIERS, 1) == [True] * 3
    assert anna.do(store, BLOCKS)
    assert anna.do(rows_in_use) == len(BLOCKS)
    anna.kill()
    assert bert.do(start_engine, service.socket, TIERS, 2) == [True] * 3
    assert bert.do(inherited, 0)
    assert bert.do(rows_in_use) == 0, "rows with the bytes of another user"
    assert again.do(start_engine, service.socket, TIERS, 1) == [True] * 3
    assert again.do(inherited, len(BLOCKS))


@needs_root
def test_a_claim_with_the_words_of_another_users_engine_gets_other_rows(
    service: ServiceProcess, user: Callable[..., UserProcess]
) -> None:
    anna, bert = user(ANNA), user(BERT)
    model = ModelIdentity(name="model", weights="0" * 40, dtype="bfloat16", layout="rows")
    text = describe("name", model, (4096,), (), rows=4, stride=4096, sides=3, tiers=1)
    assert anna.do(write_claimed, service.socket, text) == b"secret"
    assert anna.do(claim, service.socket, text) == b"secret"
    assert bert.do(claim, service.socket, text) == bytes(6)


def test_a_process_that_claims_rows_again_and_again_leaves_no_descriptor_for_each(tmp_path: Path) -> None:
    held: Held = {}
    model = ModelIdentity(name="model", weights="0" * 40, dtype="bfloat16", layout="rows")
    text = describe("name", model, (4096,), (), rows=4, stride=4096, sides=3, tiers=1)
    with service_in_thread(tmp_path / "cache.sock", {"type": "memory", "capacity": "1MiB"}) as service:
        found = []
        for _ in range(12):
            claim(held, service.path, text, None)
            found.append(os.fstat(held["claims"][-1][1][0]).st_ino)
            if len(found) > 1:
                end_claim(held)
        assert found.count(found[0]) == 6
        assert all(len(region.pidfds) <= 6 for region in service.regions._regions)
        end_claim(held)


# ------------------------------------------------------------------------------------------------------ who may connect


@needs_root
def test_the_kernel_and_the_service_refuse_all_others_and_engines_refuse_other_services(
    service: ServiceProcess, user: Callable[..., UserProcess]
) -> None:
    anna, outside, carl = user(ANNA), user(ANNA, group=ANNA), user(CARL)
    assert anna.do(knock, service.socket) == "taken"
    assert anna.do(knock, service.socket, None).endswith("not to the engine's own, and machine.user names no other")
    assert anna.do(knock, service.socket, str(BERT)).endswith(f"not to {BERT}, as machine.user says")
    assert anna.do(knock, service.socket, "nosuchuser").startswith("there is no user 'nosuchuser' on this machine")
    assert "Permission denied" in outside.do(knock, service.socket)
    assert f"not of {CARL}" in carl.do(knock, service.socket)
    assert "Permission denied" in anna.do(open_others, service.process.pid)
    assert f"not of {CARL}" in service.log


@needs_root
def test_a_user_that_uses_up_its_connections_leaves_the_others_theirs(
    service: ServiceProcess, user: Callable[..., UserProcess]
) -> None:
    anna, bert = user(ANNA), user(BERT)
    number, reason = bert.do(knocks, service.socket)
    assert number == MOST_CONNECTIONS // 3
    assert f"connections of the user {BERT}" in reason
    assert anna.do(start_engine, service.socket, TIERS, 1) == [True] * 3


@needs_root
def test_a_user_that_is_not_named_any_more_is_refused_and_the_others_find_their_blocks(
    service: ServiceProcess, user: Callable[..., UserProcess], directory: Path
) -> None:
    anna, bert = user(ANNA), user(BERT)
    for weights, one in enumerate((anna, bert)):
        assert one.do(start_engine, service.socket, ("local",), weights) == [True]
        assert one.do(store, BLOCKS)
        one.do(forget_rows)
    assert service.end() == 0
    stack = yaml.safe_load((directory / "service.yaml").read_text())
    (directory / "service.yaml").write_text(yaml.safe_dump({**stack, "users": [ANNA]}))
    service.restart()
    assert anna.do(serving)
    assert anna.do(load, BLOCKS) == ([*BLOCKS], [])
    assert f"not of {BERT}" in bert.do(knock, service.socket)


@needs_root
def test_a_user_without_any_process_is_unknown_in_the_service(
    service: ServiceProcess, user: Callable[..., UserProcess]
) -> None:
    assert user(65534).do(knock, service.socket).startswith("the kernel cannot name the engine's user here")


# --------------------------------------------------------------------------------------------------------------- words


def users(*names: str | int) -> dict[int, str]:
    stack = {"primary": {"capacity": "1MiB"}, "secondary": [{"type": "memory", "capacity": "1MiB"}]}
    return users_of("service.yaml", load_stack({**stack, "users": [*names]}))


def test_users_are_named_by_name_or_number() -> None:
    assert users(61001, "61002", "daemon") == {61001: "61001", 61002: "61002", number_of("daemon"): "daemon"}
    assert users() == {}


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("nosuchuser",), r"users\[0\]: there is no user 'nosuchuser' on this machine"),
        ((61001, "61001"), r"users\[1\]: '61001' is 61001; leave it out"),
        ((61001, "061001"), r"users\[1\]: '061001' is 61001; leave it out"),
        ((os.geteuid(),), "is the service's own user, who needs no name"),
        ((65534,), "any that the kernel cannot name"),
        ((1 << 32,), "any that the kernel cannot name"),
        (("a:b",), r"users\[0\]"),
        ((-1,), r"users\[0\]"),
        (tuple(range(61001, 61009)), "users"),
    ],
)
def test_users_that_cannot_be_told_apart_are_refused(names: tuple[str | int, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        users(*names)


def test_engines_refuse_the_word_of_a_service_and_check_knows_it(tmp_path: Path) -> None:
    stack = {"primary": {"capacity": "1MiB"}, "users": ["daemon", "nosuchuser"]}
    with pytest.raises(ConfigError, match="users: belongs into the stack of a service"):
        open_manager(load_stack(stack), 4096, ModelIdentity(name="m", weights="w", dtype="f", layout="l"))
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(stack))
    done = kv_tiering("check", tmp_path / "service.yaml", "--json", "--block-bytes", "4KiB")
    found = {each["severity"]: each["text"] for each in json.loads(done.out)["findings"] if each["subject"] == "users"}
    assert found["ok"] == f"daemon has the number {number_of('daemon')}"
    assert "no user 'nosuchuser'" in found["error"]


@pytest.mark.parametrize("sent", ['{"model":"m"}', '{"model":"m","user":"anna"}', '{"model":"m","user":""}'])
def test_no_text_of_an_engine_names_the_namespace_of_another_user(sent: str) -> None:
    own, anna, bert = (parameters_of(user, sent) for user in ("", "anna", "bert"))
    assert own == sent
    assert json.loads(bert) == {"model": "m", "user": "bert"}
    assert json.loads(anna) == {"model": "m", "user": "anna"}
    assert len({Namespace(text).directory for text in (anna, bert)}) == 2


def test_two_spellings_of_a_namespace_are_one(tmp_path: Path) -> None:
    tiers = builders(load_stack(stack_of({"type": "memory", "capacity": "1MiB"})).secondary)
    service = MachineService(tmp_path / "cache.sock", tiers, most_bytes=1 << 20, user="anna")
    try:
        texts = ('{"a":1,"b":2}', '{"b": 2, "a": 1}', '{"a":1,"b":3}')
        spaces = [service._namespace(Greeting("memory", text, (64,), 4, 64)) for text in texts]
        assert spaces[0] is spaces[1] is not spaces[2]
    finally:
        service.stop()
        assert service.run()


@pytest.mark.parametrize("sent", ["", "[]", "{", "7", '{"a":' * 5000, "NaN"])
def test_parameters_that_are_no_mapping_are_refused(sent: str) -> None:
    with pytest.raises(MessageError):
        parameters_of("anna", sent)


# ------------------------------------------------------------------------------------------------------------- threads


class FailingService:
    """A service whose thread has an error."""

    is_full = stopping = False

    def run(self) -> bool:
        raise RuntimeError("a defect")


def test_an_error_in_the_service_of_one_user_refuses_its_engines_alone(caplog: pytest.LogCaptureFixture) -> None:
    own: Any = FailingService()
    users = {ANNA: UserThread("anna", own)}
    users[ANNA].start()
    users[ANNA].join(60.0)
    assert not users[ANNA].has_ended
    assert "the user anna is not served any more" in caplog.text
    service, reason = service_for(ANNA, own, users)
    assert service is None
    assert f"not of {ANNA}" in reason
    assert service_for(os.geteuid(), own, users) == (own, "")


def test_a_user_without_a_thread_is_refused_and_the_others_are_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    own: Any = FailingService()
    users = {ANNA: UserThread("anna", own)}
    users[ANNA].start()
    assert "the user anna is not served, because no thread can be started" in caplog.text
    assert users[ANNA].has_ended
    assert service_for(ANNA, own, users)[0] is None
    assert service_for(os.geteuid(), own, users) == (own, "")


@pytest.mark.parametrize("is_alive", [True, False])
def test_counts_of_a_user_whose_service_hangs_or_has_ended_are_the_last_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    hanging = MachineService(tmp_path / "cache.sock", {}, most_bytes=1, user="anna", parts=2)
    hanging.counts = ServiceCounts(service_responsive=1, service_connections=5)
    with service_in_thread(tmp_path / "cache.sock", {"type": "memory", "capacity": "1MiB"}) as own:
        assert look_at(own, {}, 60.0).service.service_responsive == 1
        thread = UserThread("anna", hanging)
        monkeypatch.setattr(thread, "is_alive", lambda: is_alive)
        look = look_at(own, {ANNA: thread}, 1.0 if is_alive else 600.0)
    assert look.service.service_connections == 5
    assert look.service.service_responsive == 1, "one user could make an operator's probe restart the service"
    assert look_at(hanging, {}, 0.1).service.service_responsive == 0
