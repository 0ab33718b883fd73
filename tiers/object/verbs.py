"""Kinds of requests to an object store."""

from __future__ import annotations

import enum


class Verb(enum.Enum):
    """Kind of a request, as services charge for it."""

    GET = "get"
    HEAD = "head"
    PUT = "put"
    DELETE = "delete"
    LIST = "list"
