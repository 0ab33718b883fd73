"""The command line on a pool: check, inspect, clear, gc and new epochs, against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import valkey
import yaml

from examples.valkey_server import ValkeyServer, serving
from tests.cli.runner import kv_tiering
from tests.patience import PATIENT
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import K
from tiers.valkey import VALKEY_TIER, ValkeyOptions

BLOCK = 64 << 10


@pytest.fixture(autouse=True)
def _no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``epoch new`` look once whether the server has kept the epoch."""
    monkeypatch.setattr("tiering.admin.shared_admin.SURE_SECONDS", 1e-9)


@pytest.fixture
def raw(own_server: ValkeyServer) -> valkey.Valkey:
    own = valkey.Valkey(port=own_server.port)
    own.config_set("maxmemory", "64mb")
    own.config_set("maxmemory-policy", "volatile-lru")
    return own


@pytest.fixture
def stack(own_server: ValkeyServer, tmp_path: Path) -> Path:
    path = tmp_path / "stack.yaml"
    tier = {"type": "valkey", "url": own_server.url}
    path.write_text(yaml.safe_dump({"primary": {"capacity": "8MiB"}, "secondary": [tier]}))
    return path


def fill(server: ValkeyServer, *models: str) -> None:
    """Store six blocks of each model, and end."""
    for model in models:
        rig = TierRig(
            lambda context: VALKEY_TIER.build(ValkeyOptions(url=server.url, **PATIENT), context),
            group_bytes=(BLOCK,),
            model=model,
        ).open()
        rig.store(K[:6])
        rig.close()


def count(raw: valkey.Valkey) -> int:
    return len(raw.keys("kv-tiering/blocks/*"))


def check(stack: Path) -> tuple[int, dict[str, tuple[str, str]]]:
    done = kv_tiering("check", stack, "--tier", "valkey", "--json", "--block-bytes", BLOCK)
    found = json.loads(done.out)["findings"]
    return done.code, {item["subject"]: (item["severity"], item["text"]) for item in found}


def test_check_finds_a_server_in_order_and_leaves_nothing_on_it(raw: valkey.Valkey, stack: Path) -> None:
    code, found = check(stack)
    assert code == 0
    assert {subject: severity for subject, (severity, _) in found.items()} == {
        "server": "ok",
        "memory": "ok",
        "round trip": "ok",
    }
    assert raw.keys("*") == []


@pytest.mark.parametrize(
    ("words", "severity", "part"),
    [
        ({"maxmemory": "0"}, "warning", "no maxmemory"),
        ({"maxmemory-policy": "noeviction"}, "warning", "evicts nothing"),
        ({"maxmemory-policy": "allkeys-lru"}, "warning", "may evict the documents"),
    ],
)
def test_check_warns_of_settings(
    raw: valkey.Valkey, stack: Path, words: dict[str, str], severity: str, part: str
) -> None:
    for word, value in words.items():
        raw.config_set(word, value)
    found = check(stack)[1]["memory"]
    assert found[0] == severity
    assert part in found[1]


def test_check_names_a_server_that_is_not_there_a_replica_and_a_wrong_password(
    raw: valkey.Valkey, stack: Path, own_server: ValkeyServer
) -> None:
    with serving() as primary:
        raw.replicaof("127.0.0.1", primary.port)
        code, found = check(stack)
        assert (code, found["role"][0]) == (1, "error")
        raw.replicaof("NO", "ONE")
    raw.config_set("requirepass", "swordfish")
    code, found = check(stack)
    assert (code, found["server"][0]) == (1, "error")
    assert "password" in found["server"][1]
    own_server.kill()
    assert check(stack)[1]["server"][0] == "error"


def test_inspect_shows_and_verifies_the_content(raw: valkey.Valkey, stack: Path, own_server: ValkeyServer) -> None:
    fill(own_server, "model-a", "model-b")
    done = kv_tiering("inspect", stack, "--verify", "--json")
    content = json.loads(done.out)["valkey"]
    assert done.code == 0
    assert content["verified"]["blocks"] == 12
    assert "model-a" in done.out
    name = raw.keys("kv-tiering/blocks/*")[0]
    raw.setrange(name, 1000, b"damage")
    done = kv_tiering("inspect", stack, "--verify")
    assert done.code == 1
    assert "1 damaged" in done.out


def test_clear_removes_one_namespace(raw: valkey.Valkey, stack: Path, own_server: ValkeyServer) -> None:
    fill(own_server, "model-a", "model-b")
    names = {name.decode().split("/")[2] for name in raw.keys("kv-tiering/blocks/*")}
    assert "would remove 6 of 12" in kv_tiering("clear", stack, "--namespace", min(names)).out
    assert count(raw) == 12
    assert kv_tiering("clear", stack, "--namespace", min(names), "--yes").code == 0
    assert {name.decode().split("/")[2] for name in raw.keys("kv-tiering/blocks/*")} == {max(names)}


def test_a_new_epoch_says_that_a_revision_keeps_its_blocks(
    raw: valkey.Valkey, stack: Path, own_server: ValkeyServer
) -> None:
    fill(own_server, "model-a")
    stack.write_text(stack.read_text() + "revision: step-1\n")
    for yes in ((), ("--yes",)):
        done = kv_tiering("epoch", "new", stack, "--all", *yes)
        assert (done.code, "a new epoch has begun" in done.out) == (1, bool(yes))
        assert "its engines serve them until the stack has another revision" in done.err


def test_gc_removes_blocks_of_epochs_that_nobody_uses(
    raw: valkey.Valkey, stack: Path, own_server: ValkeyServer
) -> None:
    fill(own_server, "model-a")
    assert "would remove 0 of 6" in kv_tiering("gc", stack, "--grace", "0s").out or count(raw) == 6
    done = kv_tiering("epoch", "new", stack, "--all", "--yes")
    assert (done.code, "a new epoch has begun" in done.out) == (0, True)
    fill(own_server, "model-a")
    assert count(raw) == 12
    assert kv_tiering("gc", stack, "--grace", "1ms", "--yes").code == 0
    assert count(raw) == 6
    rig = TierRig(
        lambda context: VALKEY_TIER.build(ValkeyOptions(url=own_server.url, **PATIENT), context), group_bytes=(BLOCK,)
    ).open()
    assert rig.load(K[:6]) == K[:6]
    rig.close()
