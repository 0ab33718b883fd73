"""Probes of the server that coordinates a fleet: its address, settings and permissions.

Coordination is optional. Without the server, a tier works at a higher cost, so no defect of the server is an error. The
probes run the real commands on a directory of their own, which they remove.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tiering import ConfigError, StoreError, TemporaryStoreError
from tiering.tier import Finding, Severity, format_bytes
from tiers.coordination import coordination
from tiers.coordination.directory import Digests, Directory, load_scripts
from tiers.coordination.scripts import DIGEST_BYTES
from tiers.valkey.client import ServerAddress, ValkeyClient

SERVER = "coordination"
"""Subject of the finding about the connection."""
VERSION = "coordination version"
"""Subject of the findings about the server's version and role."""
MEMORY = "coordination memory"
"""Subject of the findings about the server's memory and eviction."""
MACHINES = "coordination machines"
"""Subject of the finding about the engines that coordinate on the medium."""
PERMISSIONS = "coordination permissions"
"""Subject of the findings about the commands that coordination runs."""

GRANTS = (
    "+evalsha +script|load +ping +set +del +hdel +hget +hset +hmget +getrange +setrange +strlen +pexpire +time "
    "+publish +subscribe"
)
"""Rules of an access list that permit all commands of coordination."""
PATTERNS = "~kv-tiering:* &kv-tiering:*"
"""Rules of an access list that permit the keys and the channels of coordination."""

LEAST_VERSION = 5
"""Oldest major version of Redis whose scripts may write after they have read the time."""

PROBE_SECONDS = 5.0
"""Seconds within which the server must answer a probe. Engines wait for less."""

_WITHOUT = "the tier works without it, with more requests"


def probe_coordination(
    address: ServerAddress, ca_file: Path | None = None, medium: bytes = b"", place_prefixes: Sequence[str] = ()
) -> Iterator[Finding]:
    """Yield findings about the server that coordinates a tier.

    Args:
        address: the server.
        ca_file: PEM file of the authorities that may sign the server's certificate; default: the system's.
        medium: identifier of the medium; default: unknown, so no engines are counted.
        place_prefixes: the epochs on the medium, each by the prefix of its places; default: none.
    """
    try:
        client = ValkeyClient(
            address, connect_timeout=PROBE_SECONDS, timeout=PROBE_SECONDS, ca_file=ca_file, name="kv-tiering-check"
        )
    except ConfigError as error:
        yield Finding(Severity.ERROR, SERVER, str(error), "install the extra, or remove the word coordination")
        return
    with contextlib.closing(client):
        try:
            client.call("PING")
            began = time.monotonic()
            client.call("PING")
            took = time.monotonic() - began
        except StoreError as error:
            yield Finding(Severity.WARNING, SERVER, f"{error}; {_WITHOUT}", _remedy(address, error))
            return
        yield _latency(address, took)
        yield from _probe_settings(client)
        yield from _probe_commands(client)
        if medium:
            yield _engines(client, [Directory(client, medium, prefix) for prefix in place_prefixes])


def _remedy(address: ServerAddress, error: StoreError) -> str:
    if error.temporary:
        return "start the server, and look at the address, the port and the network between it and this machine"
    return (
        f"put the password into the environment variable {address.password_variable}, and look at the user, "
        "the access list and the certificate, whose authority coordination_ca_file names"
    )


def _latency(address: ServerAddress, took: float) -> Finding:
    text = f"{address} answers in {1e3 * took:.1f} ms"
    if took < coordination.TIMEOUT_SECONDS / 2:
        return Finding(Severity.OK, SERVER, text)
    text = f"{text}, and engines wait for {1e3 * coordination.TIMEOUT_SECONDS:.0f} ms at most"
    return Finding(Severity.WARNING, SERVER, text, "move the server nearer to the engines, or relieve it")


def _engines(client: ValkeyClient, directories: Sequence[Directory]) -> Finding:
    """Return the finding about the engines that subscribe to the channels of ``directories``."""
    try:
        answer = client.call("PUBSUB", "NUMSUB", *[directory.channel for directory in directories])
        engines = sum(map(int, answer[1::2]))
    except (StoreError, TypeError, ValueError) as error:
        return Finding(
            Severity.INFO, MACHINES, f"engines cannot be counted: {error}", "allow the user the command PUBSUB"
        )
    compare = "compare the number with the engines that run: the others use another server, bucket, prefix or version"
    return Finding(Severity.INFO, MACHINES, f"{engines} engines coordinate on this bucket here", compare)


def _probe_settings(client: ValkeyClient) -> Iterator[Finding]:
    try:
        facts = client.info()
    except StoreError as error:
        text = f"version and memory cannot be read: {error}"
        yield Finding(Severity.INFO, VERSION, text, "allow the user the command INFO")
        return
    yield from version_findings(facts)
    yield from memory_findings(facts)


def version_findings(facts: dict[str, str]) -> Iterator[Finding]:
    """Yield findings about the server's version and role.

    Args:
        facts: the server's answer to INFO.
    """
    compatible = facts.get("redis_version", "")
    major = compatible.partition(".")[0]
    name = f"valkey {facts['valkey_version']}" if "valkey_version" in facts else f"redis {compatible or 'unknown'}"
    if major.isdecimal() and int(major) < LEAST_VERSION:
        text = f"{name} is too old for the scripts of coordination; {_WITHOUT}"
        yield Finding(Severity.WARNING, VERSION, text, f"install Valkey, or Redis {LEAST_VERSION} or later")
    elif facts.get("role", "master") != "master":
        yield Finding(
            Severity.WARNING, VERSION, f"the server is a replica, which takes no writes; {_WITHOUT}", "name the primary"
        )
    elif facts.get("cluster_enabled", "0") != "0":
        text = (
            "the server is a node of a cluster, and coordination uses one server and follows no redirection; "
            f"{_WITHOUT}"
        )
        yield Finding(Severity.WARNING, VERSION, text, "name a server without cluster mode")
    else:
        yield Finding(Severity.OK, VERSION, name)


def memory_findings(facts: dict[str, str]) -> Iterator[Finding]:
    """Yield a finding about the server's memory and its eviction.

    Args:
        facts: the server's answer to INFO.
    """
    most, policy = int(facts.get("maxmemory", 0)), facts.get("maxmemory_policy", "")
    used = f"{format_bytes(int(facts.get('used_memory', 0)))} of {format_bytes(most)} used"
    remedy = "set maxmemory-policy volatile-ttl"
    if not most:
        text = "the server has no maxmemory; the directory takes 2.7 bytes for each block of the fleet"
        yield Finding(Severity.INFO, MEMORY, text, f"set maxmemory with room, and {remedy.removeprefix('set ')}")
    elif policy == "noeviction":
        text = f"{used}, and the server evicts nothing: once full, it refuses claims and the directory; {_WITHOUT}"
        yield Finding(Severity.WARNING, MEMORY, text, remedy)
    elif policy.startswith("allkeys") or policy.endswith("random"):
        text = f"{used}; {policy} may evict the directory, and each loss costs a listing of the bucket"
        yield Finding(Severity.WARNING, MEMORY, text, remedy)
    else:
        yield Finding(Severity.OK, MEMORY, f"{used}, eviction {policy}")


def _probe_commands(client: ValkeyClient) -> Iterator[Finding]:
    """Run each command of coordination on a directory that no engine uses."""
    directory = Directory(client, f"check-{secrets.token_hex(16)}".encode(), "")
    failed: list[str] = []
    reason: StoreError | None = None
    try:
        for name, step in _steps(client, directory):
            try:
                step()
            except StoreError as error:
                failed.append(name)
                reason = reason or error
    finally:
        left = _remove(client, directory)
    reason = reason or left
    if left is not None:
        failed.append("remove keys")
    if reason is None:
        yield Finding(Severity.OK, PERMISSIONS, "scripts, keys and notices work")
    else:
        text = f"these steps fail: {', '.join(failed)}; {_WITHOUT}: {reason}"
        remedy = f"let the user run {GRANTS} on {PATTERNS}, on a server that is no replica and no proxy"
        yield Finding(Severity.WARNING, PERMISSIONS, text, remedy)


def _steps(client: ValkeyClient, directory: Directory) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each step with its name.

    A step raises StoreError if the server refuses the command, or answers wrongly.
    """
    digest: Digests = secrets.token_bytes(DIGEST_BYTES)

    def claim() -> None:
        _expect(client.call(*directory.claim(digest)), b"1")
        _expect(client.call(*directory.release(digest)), 1)

    def notify() -> None:
        with client.subscribe(directory.channel) as subscription:
            # The first read ends with the confirmation of the subscription, or with its refusal.
            subscription.read(0.0)
            client.call(*directory.notify(digest))
            _expect(subscription.read(PROBE_SECONDS), (directory.channel, directory.owner + digest))

    yield "load scripts", lambda: client.replies(load_scripts())
    yield "add blocks", lambda: _expect(directory.finish(directory.fill(digest)), True)
    yield "look blocks up", lambda: _expect(directory.answers(digest), (True, [True]))
    yield "claim uploads", claim
    yield "count touches", lambda: _expect(client.call(*directory.touch(digest)), b"0")
    yield "distrust the directory", lambda: _expect(client.call(*directory.distrust()), 1)
    yield "claim the fill", lambda: _expect(client.call(*directory.claim_fill()), b"OK")
    yield "notify machines", notify


def _expect(found: object, wanted: object) -> None:
    """Raise TemporaryStoreError unless the server's answer is the right one."""
    if found != wanted:
        raise TemporaryStoreError(f"the server answers with {str(found)[:60]}, not {wanted}")


def _remove(client: ValkeyClient, directory: Directory) -> StoreError | None:
    """Remove the keys of a directory, and return the error if that fails.

    Keys that are left expire within 25 hours.
    """
    try:
        generation = client.call("HGET", directory.name, "gen")
        hour = int(client.call("TIME")[0]) // 3600
        names = [directory.name, f"{directory.name}:fill"]
        names += [f"{directory.name}:touch:{hour - back}" for back in range(2)]
        if generation is not None:
            names.append(f"{directory.name}:{bytes(generation).decode(errors='replace')}:0")
        client.call("DEL", *names)
    except StoreError as error:
        return error
    return None
