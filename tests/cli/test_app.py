"""The command line as a whole: help, versions, wrong words, exit codes, pipes, missing packages."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

import tiering
from tests.cli.conftest import WriteStack
from tests.cli.runner import ROOT, command, kv_tiering, process, program
from tiering.cli.app import FINDINGS, INTERRUPTED, USAGE, cli
from tiering.cli.parameters import DURATION
from tiering.errors import PermanentStoreError


def test_what_is_imported_is_not_looked_through_at_the_end_of_the_process() -> None:
    """A look through all of it takes a third of a short command, and of the end and start of a service."""
    code = (
        "import atexit, gc; atexit.register(lambda: print(gc.isenabled(), gc.get_freeze_count() > 10_000)); "
        "from tiering.cli.__main__ import main; main()"
    )
    done = program(code, "--version")
    assert done.out.splitlines()[-1] == "True True"


def test_help_lists_every_command_and_the_exit_codes() -> None:
    done = kv_tiering("--help")
    assert done.code == 0
    assert all(f"\n  {name}  " in done.out for name in cli.commands)
    assert "Exit codes: 0" in done.out
    assert kv_tiering().out == done.out


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_the_help_of_each_command_has_an_example(name: str) -> None:
    done = kv_tiering(name, "--help")
    assert done.code == 0
    assert f"kv-tiering {name}" in done.out.partition("Example")[2]


def test_the_version_is_the_librarys() -> None:
    assert tiering.__version__ in process("--version").out


@pytest.mark.parametrize("words", [("nosuch",), ("schema", "--nosuch"), ("--nosuch",), ("schema", "more")])
def test_a_wrong_command_line_is_one_line_and_code_2(words: tuple[str, ...]) -> None:
    done = kv_tiering(*words)
    assert (done.code, done.out, done.err.count("\n")) == (USAGE, "", 1)
    assert done.err.startswith("kv-tiering: ")


def test_a_value_that_is_no_number_is_named_without_click_s_words() -> None:
    done = kv_tiering("trace", "generate", "--rate", "abc")
    assert done.err.startswith("kv-tiering: Invalid value for '--rate': 'abc' is not a valid number.")
    assert "is not a valid integer." in kv_tiering("trace", "generate", "--requests", "abc").err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), INTERRUPTED, "kv-tiering: interrupted\n"),
        (PermanentStoreError("the medium is on fire"), FINDINGS, "kv-tiering: the medium is on fire\n"),
        (BrokenPipeError(), 0, ""),
        (OSError(12, "Cannot allocate memory"), FINDINGS, "kv-tiering: Cannot allocate memory\n"),
        (FileNotFoundError(2, "No such file", "/x"), FINDINGS, "kv-tiering: /x: No such file\n"),
        (MemoryError("8 GiB"), FINDINGS, "kv-tiering: there is not enough memory: 8 GiB\n"),
    ],
)
def test_what_ends_a_command_has_a_code_and_no_traceback(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli.commands["schema"], "callback", fail)
    done = kv_tiering("schema")
    assert (done.code, done.err.lstrip("\n")) == (code, text)


def test_an_output_that_takes_no_more_is_named() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command("schema"), cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (FINDINGS, "kv-tiering: the output: No space left on device\n")


CPU_ONLY = [
    (("bench",), "bench measures the tiers behind it"),
    (("inspect",), "its blocks end with the engine"),
    (("inspect", "--verify", "--json"), "its blocks end with the engine"),
    (("gc", "--yes"), "there is nothing to remove"),
    (("clear", "--all", "--yes"), "there is nothing to remove"),
    (("clear",), "there is nothing to remove"),
    (("epoch", "new"), "it has no epochs; reset the caches of the engine"),
    (("epoch", "new", "--all", "--yes"), "it has no epochs; reset the caches of the engine"),
]


@pytest.mark.parametrize(("words", "text"), CPU_ONLY)
def test_a_stack_with_the_cpu_tier_alone_is_told_in_one_line(
    words: tuple[str, ...], text: str, write_stack: WriteStack
) -> None:
    stack = write_stack()
    done = kv_tiering(*words, stack)
    assert (done.code, done.out, done.err.count("\n")) == (FINDINGS, "", 1)
    assert done.err.startswith(f"kv-tiering: {stack} has only the CPU tier: ")
    assert text in done.err


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closed: str, write_stack: WriteStack) -> None:
    bucket = write_stack(
        {"type": "s3", "bucket": "kv-cache", "endpoint_url": "http://127.0.0.1:9", "retries": {"attempts": 1}}
    )
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for words, code in ((("trace", "generate", "--requests", "2"), 0), (("inspect", bucket), 1)):
        run = subprocess.run(
            ["sh", "-c", f'"$@" {closed}', "sh", *command(*words)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (run.returncode, "Traceback" in run.stderr) == (code, False), run.stderr


def test_a_reader_that_closes_the_pipe_early_is_no_error() -> None:
    with subprocess.Popen(
        command("schema"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        error = running.stderr.read()
    assert error == ""


@pytest.mark.parametrize("module", ["tiering", "numpy", "tiering.cli.app", "click", "tiering.cli.top"])
def test_ctrl_c_during_the_imports_ends_the_command_without_a_traceback(module: str) -> None:
    code = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, CtrlC())
from kv_tiering import main
main()
"""
    done = program(code, "schema")
    assert (done.code, done.out, done.err) == (-signal.SIGINT, "", "")


def test_ctrl_c_after_the_run_ends_the_command_without_a_traceback() -> None:
    code = (
        "import atexit, os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "atexit.register(os.kill, os.getpid(), signal.SIGINT); "
        "from kv_tiering import main; main()"
    )
    done = program(code, "schema")
    assert (done.code, done.err) == (-signal.SIGINT, "")


def test_a_command_in_the_background_of_a_shell_ignores_ctrl_c() -> None:
    code = (
        "import atexit, os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "atexit.register(os.kill, os.getpid(), signal.SIGINT); from kv_tiering import main; main()"
    )
    done = program(code, "schema")
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("group", ["epoch", "trace"])
def test_a_group_without_a_command_shows_its_help(group: str) -> None:
    done = kv_tiering(group)
    assert (done.code, done.err, "Commands:" in done.out) == (0, "", True)


@pytest.mark.parametrize("package", ["click"])
def test_a_missing_package_names_the_extra(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from tiering.cli.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == USAGE
    assert done.stderr.count("\n") == 1
    assert "pip install '.[cli]'" in done.stderr


def test_the_library_is_imported_without_the_command_line() -> None:
    code = "import sys, tiering; print(*[m for m in ('tiering.cli', 'click', 'rich', 'aiofiles') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


def test_the_document_shows_every_command_and_no_other() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    told = set(re.findall(r"kv-tiering (?:-v )?([a-z]+)\b", text + (ROOT / "README.md").read_text()))
    assert told <= cli.commands.keys()
    assert cli.commands.keys() - set(re.findall(r"`([a-z]+)[ `]", text)) == set()


@pytest.mark.parametrize(("text", "good"), [("300", True), ("2.5", True), ("7d", True), ("0", False), ("-3d", False)])
def test_durations_are_written_as_in_a_stack(text: str, good: bool) -> None:
    try:
        assert DURATION.convert(text, None, None) > 0
        assert good
    except click.BadParameter:
        assert not good


def test_threads_that_abort_the_end_of_the_interpreter_do_not_change_the_exit_code() -> None:
    code = (
        "import atexit, os, sys, types; sys.modules['obstore'] = types.ModuleType('obstore'); "
        "atexit.register(os.abort); import tiering.cli.__main__; tiering.cli.__main__.main()"
    )
    for words, expected in ((["schema"], 0), (["no-such-command"], 2)):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == expected, done.stderr
        if expected == 0:
            assert done.stdout == (ROOT / "configs" / "stack.schema.json").read_text()
        else:
            assert "no-such-command" in done.stderr


def test_shells_complete_commands_and_file_names() -> None:
    def completed(words: str) -> str:
        environment = {
            "_KV_TIERING_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        done = subprocess.run(
            command(),
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert "plain,check" in completed("kv-tiering ch")
    for name in ("check", "inspect", "gc", "top"):
        assert completed(f"kv-tiering {name} st").startswith("file,")


def test_a_reader_that_has_seen_enough_ends_a_command_well(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text("primary: {capacity: 16MiB}\n")
    words = command("check", tmp_path / "stack.yaml")
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert (running.stderr.read(), running.wait(60)) == (b"", 0)
