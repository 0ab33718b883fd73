"""``python -m examples.demo`` plays the demonstration and writes ``build/demo/report.json``.

The exit code is 0 only if all checks hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from examples.demo.display import Display
from examples.demo.report import Check, write_report
from examples.demo.story import ActFailed, Story


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo"), help="where everything is written (default: %(default)s)"
    )
    parser.add_argument("--plain", action="store_true", help="plain lines also on a terminal")
    options = parser.parse_args()
    display = Display(options.plain)
    story = Story(options.out / "work", display)
    began = time.monotonic()
    try:
        story.tell()
    except (ActFailed, RuntimeError, OSError, ValueError) as error:
        story.checks.append(Check("the demonstration ran to its end", False, str(error)))
    seconds = time.monotonic() - began
    if story.acts:
        display.heading("Side by side")
        display.table([*story.acts, *story.machine, *story.controls], story.acts[0])
    display.heading("What was claimed, and whether it held")
    display.checks(story.checks)
    report = options.out / "report.json"
    write_report(report, [*story.acts, *story.machine], story.controls, story.checks, seconds)
    held = all(check.held for check in story.checks)
    if held:
        story.tidy()
    display.say(
        f"\n{'Everything held' if held else 'NOT everything held'}, in {seconds:.0f} s. The numbers are in {report}."
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
