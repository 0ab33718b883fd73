"""``serve``: one process hosts the secondary tiers of a machine for all its engines."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import click

from tiering.api.masking import guard_logs
from tiering.cli.machine import probe_shares
from tiering.cli.parameters import DURATION, stack_argument
from tiering.cli.service_metrics import endpoint
from tiering.cli.successor import Successor, end_predecessor
from tiering.cli.transfer_config import stack_at
from tiering.config.io_process import builders
from tiering.config.problems import Problem, refuse, refused
from tiering.config.stack_file import StackConfig
from tiering.errors import ConfigError, TieringError
from tiering.machine.options import HOSTED_TYPES, LONGEST_SOCKET, MOST_TIERS, PEERS_TIER
from tiering.machine.peer_rows import PeerRows
from tiering.machine.service import MachineService
from tiering.machine.user_names import number_of
from tiering.machine.users import UserThread

_ENGINES: Sequence[str] = (
    *("machine", "io", "namespace", "salt", "revision", "keep_secondary", "warm_start", "record_trace", "explain"),
    *("events", "hints", "mode", "layout", "lazy_offload", "reset_deadline", "open_deadline"),
)
"""Words of a stack that concern one engine."""

_OF_ENGINES = ("primary_share", "min_prefix_blocks", "load_or_compute", "required")


@click.command()
@stack_argument
@click.option(
    "--socket",
    "path",
    required=True,
    type=click.Path(path_type=Path),
    help="UNIX socket on which engines connect; its directory must be this user's.",
)
@click.option(
    "--keep-rows",
    "keep_seconds",
    default="10m",
    show_default=True,
    type=DURATION,
    help="Time for which the CPU rows of an engine that has ended wait for the next one (machine.keep_rows).",
)
@click.option(
    "--metrics",
    metavar="HOST:PORT",
    help="Address of a Prometheus endpoint, like 127.0.0.1:9400, which top also reads.  [default: none]",
)
@click.option(
    "--replace",
    is_flag=True,
    help="Once this service is loaded, end the one that listens on the socket, if any, and take its place.",
)
def serve(stack: str, path: Path, keep_seconds: float, metrics: str | None, replace: bool) -> int:
    """Host the secondary tiers of STACK for all engines of this machine.

    Engines name the socket with the word machine in place of their secondary tiers. They share one disk and one way to
    a bucket. The capacity of the primary tier bounds the rows of one engine. The word users of STACK names further
    users, each with blocks of its own. SIGTERM or Ctrl-C ends the service once all I/O has ended, and what engines have
    sent is stored; a second one ends that wait. SIGUSR2 starts the command again with --replace.

    \b
    Example:
      kv-tiering serve service.yaml --socket /run/kv-tiering/cache.sock
      kv-tiering serve service.yaml --socket /run/kv-tiering/cache.sock --metrics 127.0.0.1:9400
    """
    config = stack_at(stack)
    check_service(stack, config)
    if len(bytes(path)) > LONGEST_SOCKET:
        raise click.UsageError(f"--socket: the path has more than {LONGEST_SOCKET} bytes")
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    guard_logs()
    users = users_of(stack, config)
    for finding in probe_shares(config):
        logging.getLogger("kv_tiering.machine").warning("%s: %s; %s", finding.subject, finding.text, finding.remedy)
    build = partial(
        MachineService,
        path.absolute(),
        {PEERS_TIER: PeerRows, **builders(config.secondary)},
        most_bytes=config.primary.capacity,
        shutdown_seconds=config.shutdown_deadline,
        keep_seconds=keep_seconds,
        parts=1 + len(users),
    )
    if users:  # their parts of the limits are more descriptors than a process has by default
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threads = {number: UserThread(user, partial(build, user=user)) for number, user in users.items()}
    service = build(users=threads)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the default is death, and the predecessor may be at its end already
    if replace:
        end_predecessor(path)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    successor = Successor()

    def upgrade(*_: object) -> None:
        successor.ask()
        service.wake()

    signal.signal(signal.SIGUSR2, upgrade)
    with ExitStack() as undo:
        if metrics is not None:
            port = undo.enter_context(endpoint(metrics, service.look))
            logging.getLogger("kv_tiering.machine").info("metrics at %s, port %d", metrics, port)
        service.listen()
        notifier = UnitNotifier()
        notifier.ready()

        def beat() -> None:
            notifier.beat()
            notifier.show([f"{users[number]}: {each.trouble}" for number, each in threads.items() if each.trouble])
            successor.step()

        ended = service.run(beat)
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # the interpreter's end would bring its default back, death
        if (pid := successor.pid) is not None:
            notifier.hand_over(pid)
        if not ended:
            raise TieringError("some I/O did not end in time")
    return 0


def check_service(name: str, config: StackConfig) -> None:
    """Refuse words that have no meaning in the stack of a service.

    Args:
        name: name of the stack in the message.
        config: the stack.

    Raises:
        ConfigError: the stack has such words, or no tiers.
    """
    problems = refused(config, _ENGINES, "belongs into the stacks of the engines; leave it out")
    if not config.secondary or len(config.secondary) > MOST_TIERS:
        problems.append(Problem(("secondary",), f"must have 1 to {MOST_TIERS} tiers for the engines"))
    for index, tier in enumerate(config.secondary):
        if tier.tier_name == PEERS_TIER:
            text = f"{PEERS_TIER!r} is the name of the tier of the engines' rows; give this one another"
            problems.append(Problem(("secondary", index, "name"), text))
        if config.machine is None and tier.type not in HOSTED_TYPES:
            text = f"a service cannot host {tier.type}; it can host {', '.join(HOSTED_TYPES)}"
            problems.append(Problem(("secondary", index, "type"), text))
        text = "concerns one engine's rows; the service has none, leave it out"
        problems += refused(tier, _OF_ENGINES, text, ("secondary", index))
    if problems:
        refuse(name, problems)


def users_of(name: str, config: StackConfig) -> dict[int, str]:
    """Return the users that the stack of a service names, by their numbers.

    Args:
        name: name of the stack in the message.
        config: the stack.

    Raises:
        ConfigError: this machine does not have one of them, or one is named twice.
    """
    users, problems = {os.geteuid(): "the service's own user, who needs no name"}, []
    for index, user in enumerate(config.users):
        try:
            number = number_of(user)
        except ConfigError as error:
            problems.append(Problem(("users", index), str(error)))
            continue
        if number in users:
            problems.append(Problem(("users", index), f"{user!r} is {users[number]}; leave it out"))
        users[number] = user
    if problems:
        refuse(name, problems)
    del users[os.geteuid()]
    return users


class UnitNotifier:
    """Sends systemd what a unit of the type ``notify`` expects; without such a unit, nothing.

    Args:
        environment: variables of the process.
        clock: function that returns monotonic seconds.
    """

    def __init__(
        self, environment: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._clock = clock
        is_meant = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        period = environment.get("WATCHDOG_USEC", "") if is_meant else ""
        self._seconds = int(period) / 3e6 if period.isdecimal() else 0.0
        """Time between two signs of life, a third of the watchdog's; 0: there is no watchdog."""
        self._due = 0.0
        self._troubles: Sequence[str] = []

    def ready(self) -> None:
        """Send that the service takes connections."""
        self._send("READY=1")

    def hand_over(self, pid: int) -> None:
        """Send that another process is the main one from now on."""
        self._send(f"MAINPID={pid}")

    def show(self, troubles: Sequence[str]) -> None:
        """Send which users are not served and why, for ``systemctl status``, if that has changed."""
        if troubles != self._troubles:
            self._troubles = troubles
            self._send(f"STATUS={'not served: ' * bool(troubles)}{'; '.join(troubles) or 'all users are served'}")

    def beat(self) -> None:
        """Send a sign of life, if one is due."""
        if self._seconds and (now := self._clock()) >= self._due:
            self._due = now + self._seconds
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        # An address with @ is in the kernel's abstract namespace, which begins with a zero byte.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as peer, suppress(OSError):
            peer.setblocking(False)
            peer.sendto(text.encode(), address)
