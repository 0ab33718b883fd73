"""The entry point of the command ``kv-tiering``.

This module is outside of the packages. So Ctrl-C ends the command without a traceback, also during the imports of the
packages.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line and exit with its code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tiering.cli.__main__ import main as run_and_exit

    run_and_exit()


if __name__ == "__main__":
    main()
