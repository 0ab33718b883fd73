"""The entry point of ``kv-tiering`` and of ``python -m tiering.cli``."""

from __future__ import annotations

import sys

NEEDED = frozenset({"click", "rich", "aiofiles"})
"""Packages of the extra ``cli``."""


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from tiering.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        sys.stderr.write(
            f"kv-tiering: the command line needs the package {error.name}; install kv-tiering with its extra cli "
            "(in a clone: pip install '.[cli]')\n"
        )
        sys.exit(2)
    sys.exit(run())


if __name__ == "__main__":
    main()
