"""The documents' shell commands work.

Every ``kv-tiering`` command runs, in a directory with a small stack, blocks of an engine, a trace and a metrics
endpoint. Of other programs, what they name is there: targets, extras, modules, files.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.runner import Done, kv_tiering
from tests.explain.walk import explained
from tests.test_documents import DOCUMENTS, ROOT, blocks
from tests.tiers.local.rig import LocalRig
from tiering.explain.service import ExplainService
from tiering.testing.keys import keys_of

MAKEFILE = (ROOT / "Makefile").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

STACK = """\
primary: {capacity: 64MiB}
secondary:
  - {type: local, path: kv, capacity: 64MiB, segment_size: 8MiB}
  - {type: local, name: s3, path: bucket, capacity: 64MiB, segment_size: 8MiB}
"""
"""The stack of the documents' commands; a second directory takes the place of the bucket."""

METRICS = 'kv_tiering_available{tier="local"} 1.0\n'


def commands(path: Path) -> list[str]:
    """Return the commands of a document's consoles, each with all of its lines."""
    found: list[str] = []
    for text in blocks(path, "console"):
        lines = iter(text.splitlines())
        for line in lines:
            if not line.startswith("$ "):
                continue
            command = line[2:]
            while command.endswith("\\") or not is_complete(command):
                command += "\n" + next(lines)
            found.append(command)
    return found


def is_complete(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


def simple(command: str) -> Iterator[list[str]]:
    """Yield the words of each program in a command line, without redirections and leading assignments."""
    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    skip = False
    for word in [*lexer, ";"]:
        if word in {";", "&&", "||", "|"}:
            if words:
                yield words
            words = []
        elif skip or word in {"<", ">"}:
            skip = not skip
        elif words or not re.fullmatch(r"[A-Z_]+=.*", word):
            words.append(word)


def in_sentences(path: Path) -> Iterator[str]:
    """Yield the commands with a stack that a document's sentences name."""
    text = re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for command in re.findall(r"`(kv-tiering [^`]*)`", text):
        if re.search(r" (STACK|stack\.yaml)\b", command) and not re.search(r"\||\.\.\.", command):
            for word, value in {"STACK": "stack.yaml", "NAME": "local", "TRACE": "trace.jsonl"}.items():
                command = command.replace(word, value)
            yield command


FOUND = [
    (f"{path.name}-{number}-{words[0].rpartition('/')[2]}", words)
    for path in DOCUMENTS
    for number, command in enumerate(commands(path))
    for words in simple(command)
]
KV_TIERING = [pytest.param(words, id=name) for name, words in FOUND if words[0] == "kv-tiering"]
KV_TIERING += [
    pytest.param(shlex.split(command), id=f"{path.name}-sentence-{number}")
    for path in DOCUMENTS
    for number, command in enumerate(in_sentences(path))
]
OTHERS = [pytest.param(words, id=name) for name, words in FOUND if words[0] != "kv-tiering"]


# -------------------------------------------------------------------------------------------------- kv-tiering


@contextmanager
def endpoint() -> Iterator[str]:
    """Serve a metrics endpoint, and return its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(METRICS)))
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory as an operator has it: a stack, tiers with blocks of two epochs, and a trace."""
    directory = tmp_path_factory.mktemp("operator")
    (directory / "stack.yaml").write_text(STACK)
    for numbers in (range(4), range(4, 8)):  # the first blocks are in an epoch that is abandoned
        for name in ("kv", "bucket"):
            rig = LocalRig(directory / name, model="model-a", capacity="64MiB", segment_size="8MiB").open()
            rig.store(keys_of(*numbers))
            rig.close()
        if 0 in numbers:
            with contextlib.chdir(directory):
                begun = kv_tiering("epoch", "new", "stack.yaml", "--all", "--yes")
            assert begun.code == 0, begun.err
    done = kv_tiering("trace", "generate", "--requests", 30, "--block-tokens", 16, "-o", directory / "trace.jsonl")
    assert done.code == 0, done.err
    return directory


def short(words: list[str]) -> list[str]:
    """Return the words of a ``bench`` that measures little: one size of blocks, one depth."""
    less = {"--block-bytes": "64KiB", "--depth": "1", "--bytes": "1MiB", "--seconds": "0.02"}
    words = [less.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    missing = [word for option, value in less.items() if option not in words for word in (option, value)]
    return [*words, *missing, "--no-device"]


def served(words: list[str]) -> Done:
    """Run ``serve`` in a process until it serves, and end it as an operator does."""
    named = dict(itertools.pairwise(words)).get("--socket", "")
    words = [{named: "cache.sock", "service.yaml": "stack.yaml"}.get(word, word) for word in words]
    words += [] if named else ["--socket", "cache.sock"]
    with subprocess.Popen(
        [sys.executable, "-m", "tiering.cli", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        log = next((line for line in process.stderr if " serving " in line), "")
        process.terminate()
        log += process.stderr.read()
    return Done(process.returncode if " serving " in log else 1, "", log)


@pytest.fixture
def operator(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], Done]:
    """Run a command of a document in a copy of the prepared directory."""
    directory = tmp_path / "operator"
    shutil.copytree(prepared, directory)
    monkeypatch.chdir(directory)

    def run(words: list[str]) -> Done:
        with endpoint() as url:
            replaced: Mapping[str, list[str]] = {
                "http://127.0.0.1:8000": [url],
                "http://127.0.0.1:9400": [url],
                "/var/log/kv-tiering/trace-*.jsonl": ["trace.jsonl"],
            }
            words = [new for word in words for new in replaced.get(word, [word])]
            if "--namespace" in words:
                found = kv_tiering("inspect", "stack.yaml", "--json").out
                (words[words.index("--namespace") + 1],) = set(re.findall(r'"namespace": "(\w{8})', found))
            if words[:2] == ["trace", "generate"]:
                words += ["--requests", "30"]
            if words[0] == "bench":
                words = short(words)
            if words[0] == "serve":
                return served(words)
            if words[0] == "adopt":
                words = ["adopt", "stack.yaml", "kv", *words[3:]]
            if words[0] == "why":
                monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
                engine = ExplainService(explained("cmpl-7"), None)
                done = kv_tiering(*words)
                engine.stop(30)
                return done
            return kv_tiering(*words)

    return run


def held(words: list[str]) -> dict[str, object]:
    """Return the epochs and numbers of blocks of the tiers that a command names."""
    chosen = [word for option, tier in itertools.pairwise(words) if option == "--tier" for word in (option, tier)]
    found = json.loads(kv_tiering("inspect", "stack.yaml", "--json", *chosen).out)
    return {
        tier: [[one[word] for word in ("fingerprint", "state", "blocks")] for one in content["epochs"]]
        for tier, content in found.items()
    }


CHANGES = {("epoch", "new"), ("clear", "stack.yaml"), ("gc", "stack.yaml"), ("adopt", "service.yaml")}
"""Beginnings of the commands that change a medium."""


@pytest.mark.parametrize("words", KV_TIERING)
def test_a_command_of_the_documents_does_what_it_says(words: list[str], operator: Callable[[list[str]], Done]) -> None:
    changes = tuple(words[1:3]) in CHANGES
    before = held(words) if changes else {}
    done = operator(words[1:])
    if not changes:
        assert done.code == 0, done
        return
    after = held(words)
    if "--yes" not in words:
        assert (done.code, "dry run: nothing changed" in done.err, after) == (3, True, before), done
    else:
        assert done.code == 0, done
        assert [tier for tier in before if after[tier] == before[tier]] == []


# ------------------------------------------------------------------------------------------------ other programs


def make(words: list[str]) -> None:
    for word in words:
        name, equals, _ = word.partition("=")
        target = "$(VLLM_STAMP)" if name == ".venv-vllm/.installed" else name
        ends = r"\s*\?=" if equals else ":"
        assert re.search(f"^{re.escape(target)}{ends}", MAKEFILE, re.MULTILINE), word


def pip(words: list[str]) -> None:
    assert words[0] == "install"
    for extra in re.findall(r"\.\[([\w,]+)\]", words[1]):
        assert set(extra.split(",")) <= EXTRAS.keys()


def python(words: list[str]) -> None:
    if words[0] == "-c":
        ast.parse(words[1])
    elif words[0] == "-m":
        assert words[1].startswith("vllm.") or importlib.util.find_spec(words[1]) is not None
    else:
        assert (ROOT / words[0]).is_file()


def files(words: list[str]) -> None:
    """Check the files that options like ``-f`` name."""
    for option, value in itertools.pairwise(words):
        if option == "-f":
            assert (ROOT / value).is_file()


def anything(words: list[str]) -> None:
    """Accept a program whose words name nothing of this project."""


PROGRAMS: Mapping[str, Callable[[list[str]], None]] = {
    "make": make,
    "pip": pip,
    "python": python,
    "python3": python,
    "docker": files,
    "kubectl": files,
    "vllm": lambda words: files(words) if words[0] == "serve" else pytest.fail("vllm serve"),
    **dict.fromkeys(["curl", "grep", "echo", "sed", "jq", "git", "cd", ".", "pre-commit"], anything),
}


@pytest.mark.parametrize("words", OTHERS)
def test_what_a_command_of_the_documents_names_is_there(words: list[str]) -> None:
    program = words[0].rpartition("/")[2]
    if words[0] == ".ci/run":
        assert os.access(ROOT / words[0], os.X_OK)
        return
    assert program in PROGRAMS, f"{words[0]}: say in PROGRAMS how to check it"
    PROGRAMS[program](words[1:])


def test_most_commands_are_found() -> None:
    assert len(KV_TIERING) > 20
    assert len(OTHERS) > 20


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_sentence_says_to_run_is_no_dry_run(path: Path) -> None:
    text = " ".join(path.read_text().split())
    told = re.findall(r"\b[Rr]un `(kv-tiering (?:gc|clear|epoch new)[^`]*)`|`(kv-tiering gc[^`]*)`, run every", text)
    assert [command for pair in told for command in pair if command and "--yes" not in command] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_table_of_a_console_fits_a_window_of_1400_pixels(path: Path) -> None:
    assert [line for line in path.read_text().splitlines() if line[:1] in "┏┡└" and len(line) > 120] == []
