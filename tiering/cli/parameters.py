"""Arguments and options that several commands share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from tiering.api.units import parse_duration, parse_size

Command = TypeVar("Command", bound=Callable[..., Any])

_NUMBER = re.compile(r"\d{1,30}(\.\d{1,30})?")


class Quantity(click.ParamType):  # type: ignore[type-arg]  # earlier releases of click have no parameter here
    """A size in bytes or a duration in seconds, above 0 and written as in a stack file.

    Args:
        name: name of the type in messages.
        parse: parser of the stack file, which takes a number for the unit alone.
        kind: type of the value.
    """

    def __init__(self, name: str, parse: Callable[[Any], float], kind: type[int] | type[float]) -> None:
        self.name = name
        self._parse = parse
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            plain = isinstance(value, str) and (value.isdigit() if self._kind is int else _NUMBER.fullmatch(value))
            found = self._parse(self._kind(value) if plain else value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if found <= 0:
            self.fail(f"{value!r} is not above 0", param, ctx)
        return found


class Number(click.FloatRange):
    """A number within bounds; ``nan``, which no bound excludes, and infinity are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number", param, ctx)
        return found


SIZE = Quantity("size", parse_size, int)
"""Type of options that take a size."""
DURATION = Quantity("duration", parse_duration, float)
"""Type of options that take a duration."""


def stack_argument(command: Command) -> Command:
    """Add the argument STACK."""
    return click.argument("stack", metavar="STACK", type=click.Path())(command)  # shells complete file names


def change_options(command: Command) -> Command:
    """Add ``--yes`` and ``--dry-run``."""
    command = click.option("--dry-run", is_flag=True, help="Print what would be done, and change nothing.")(command)
    return click.option("--yes", is_flag=True, help="Do it without asking. Otherwise a pipe gets a dry run.")(command)


def namespace_options(all_help: str) -> Callable[[Command], Command]:
    """Return the options ``--namespace`` and ``--all``."""
    name = "Beginning of the namespace's name, as in kv-tiering inspect."
    one = click.option("--namespace", metavar="HEX", help=name)
    every = click.option("--all", "everything", is_flag=True, help=all_help)
    return lambda command: one(every(command))


def json_option(command: Command) -> Command:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(command)


def device_cache_option(effect: str) -> Callable[[Command], Command]:
    """Return the option ``--device-cache``.

    Args:
        effect: what it means without the option.
    """
    return click.option(
        "--device-cache", type=SIZE, metavar="SIZE", help=f"The engine's own prefix cache; default: {effect}."
    )
