"""The group of all commands, and the exit codes and error lines that they share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import click

from tiering import __version__
from tiering.api.masking import mask_text
from tiering.cli.adopt import adopt
from tiering.cli.bench import bench
from tiering.cli.check import check
from tiering.cli.epoch import epoch
from tiering.cli.inspect import inspect_command
from tiering.cli.remove import clear, gc
from tiering.cli.replay import replay
from tiering.cli.schema import schema
from tiering.cli.serve import serve
from tiering.cli.top import top
from tiering.cli.trace import trace
from tiering.cli.why import why
from tiering.errors import ConfigError, TieringError

OK = 0
"""Exit code of a command that found nothing wrong."""
FINDINGS = 1
"""Exit code of a command that found problems, or that could not do all of its work."""
USAGE = 2
"""Exit code of a wrong command line or an invalid stack."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""

EPILOG = """\b
Exit codes: 0 nothing wrong, 1 problems found or work not done,
2 wrong command line or invalid stack, 3 a dry run of adopt, gc, clear or epoch new
that would have changed something, 130 interrupted.

\b
Examples:
  kv-tiering check stack.yaml
  kv-tiering bench stack.yaml --prefill-tokens-per-second 8000 --bytes-per-token 128KiB
  kv-tiering inspect stack.yaml --verify
  kv-tiering top http://127.0.0.1:8000
  kv-tiering why chatcmpl-1234
  kv-tiering schema > stack.schema.json
  kv-tiering serve service.yaml --socket /run/kv-tiering/cache.sock
"""


class _Commands(click.Group):
    """The group of all commands: one whose reader has seen enough has ended well."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, SystemExit) as error:  # rich makes an exit of the closed pipe
            if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
                raise
            sys.stdout = None  # Python would report the closed pipe again at exit
            return OK


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
    invoke_without_command=True,
)
@click.version_option(__version__, prog_name="kv-tiering")
@click.option("--verbose", "-v", is_flag=True, help="Show the library's log on stderr.")
@click.pass_context
def cli(context: click.Context, verbose: bool) -> None:
    """Check, measure, inspect and size the tiers of a KV cache.

    STACK is the YAML file that an engine gets. No command needs an engine or a model.
    """
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    else:
        # Commands report problems themselves. Without a handler, Python would print the log's warnings on stderr.
        logging.getLogger("kv_tiering").addHandler(logging.NullHandler())
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (adopt, bench, check, clear, epoch, gc, inspect_command, replay, schema, serve, top, trace, why):
    cli.add_command(command)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. Errors become one line each on stderr.

    Args:
        arguments: words after the program's name; default: those of this process.
    """
    try:
        code = cli.main(None if arguments is None else list(arguments), prog_name="kv-tiering", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f" (try '{context.command_path} --help')" if context is not None else ""
        # click names a bounded number "float range" or "integer range".
        message = error.format_message().replace("float range", "number").replace("integer range", "integer")
        return _fail(f"{message}{hint}", USAGE)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", INTERRUPTED)
    except ConfigError as error:
        return _fail(str(error), USAGE)
    except TieringError as error:
        return _fail(str(error), FINDINGS)
    except OSError as error:
        where = error.filename or ("the output" if _in_output(error) else None)
        return _fail(f"{'' if where is None else f'{where}: '}{error.strerror or error}", FINDINGS)
    except MemoryError as error:
        return _fail(f"there is not enough memory: {error or 'an allocation failed'}", FINDINGS)
    return code if isinstance(code, int) else OK


def _in_output(error: BaseException) -> bool:
    """Return True if ``error`` was raised by a library that prints: such errors name no file."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__"))
    return module.partition(".")[0] in {"click", "rich"}


def _fail(text: str, code: int) -> int:
    click.echo(f"kv-tiering: {mask_text(text)}", err=True)
    return code
