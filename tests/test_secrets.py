"""A secret of a stack appears nowhere: no error, traceback, log line or output shows it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import pytest
import yaml
from pydantic import SecretStr, field_validator

import tiering
import tiering.tier
from tiering.api import masking
from tiering.api.masking import guard_logs, mask_text
from tiering.block_tier.definition import TierDefinition
from tiering.config.registry import TIER_TYPES, tier_definition
from tiering.testing.keys import keys_of

MODEL = tiering.ModelIdentity(name="org/model", weights="0" * 40, dtype="bfloat16", layout="secrets")
PRIMARY = {"capacity": "1MiB"}
SENTINEL = "hunter2-hunter2"
KEYS = keys_of(*range(2))


class LeakyOptions(tiering.TierOptions):
    """The options of a user's tier with an address that holds a password, and every way to repeat it."""

    endpoint: str = ""
    dsn: str = ""
    password: str = ""
    session: SecretStr = SecretStr("")
    fails: str = ""
    file: Path = Path()

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str) -> str:
        if "badvalue" in endpoint:
            raise ValueError(f"{endpoint} is no endpoint, {endpoint!r}")
        if "badtype" in endpoint:
            raise TypeError(f"cannot use {endpoint}")
        return endpoint


class LeakyTier(tiering.SecondaryTierManager):
    """A tier that raises an error with its options in the text, in the method that ``fails`` names."""

    traits = tiering.tier.TierTraits()

    def __init__(self, options: LeakyOptions, context: tiering.TierContext) -> None:
        self.name = context.name
        self._options = options
        self._log = logging.getLogger("kv_tiering.leaky")

    def _maybe(self, method: str) -> None:
        if self._options.fails == method:
            _raise(self._options, ConnectionError)

    def lookup(self, key: bytes, req_context: tiering.ReqContext) -> bool | None:
        self._maybe("lookup")
        return False

    def submit_store(self, job: tiering.TransferJob) -> None:
        self._maybe("submit_store")

    def submit_load(self, job: tiering.TransferJob) -> None:
        self._maybe("submit_load")

    def get_finished(self) -> Iterable[tiering.JobResult]:
        self._maybe("get_finished")
        return ()

    def open(self, deadline: float) -> bool:
        self._log.warning("opening %s, %r", self._options.endpoint, self._options.dsn)
        self._maybe("open")
        return True

    def shutdown(self, deadline: float) -> bool:
        self._maybe("shutdown")
        return True


def _raise(options: LeakyOptions, kind: type[Exception]) -> NoReturn:
    texts = [options.endpoint, options.dsn, options.password, options.session.get_secret_value()]
    try:
        raise OSError(f"no answer from {texts[0]}")
    except OSError as error:
        raise kind(f"cannot connect: {texts!r}, {texts[0]}") from error


def _build(options: LeakyOptions, context: tiering.TierContext) -> LeakyTier:
    if options.fails == "build":
        _raise(options, RuntimeError)
    if options.fails == "build_config":
        _raise(options, tiering.ConfigError)
    return LeakyTier(options, context)


def _location(options: LeakyOptions) -> str | None:
    if options.fails == "location":
        _raise(options, RuntimeError)
    return options.endpoint or None


LEAKY = TierDefinition(LeakyOptions, _build, persistent=False, location=_location)
TYPE = "tests.test_secrets:LEAKY"


@pytest.fixture
def written(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """Function that returns all log text, including tracebacks and the raw arguments of records."""
    formatter = logging.Formatter("%(name)s %(message)s")

    def text() -> str:
        carried = [repr(record.args) + repr(record.msg) + repr(record.exc_info) for record in caplog.records]
        return "\n".join([*map(formatter.format, caplog.records), *carried])

    with caplog.at_level(logging.DEBUG):
        yield text


def told(error: BaseException) -> str:
    """Return all text of an error and of the errors that it refers to."""
    shown, seen = "".join(traceback.format_exception(error)), error.__context__
    while seen is not None:
        shown, seen = shown + repr(seen), seen.__context__
    return shown + str(error) + repr(error)


PASSWORDS = [
    "plain-secret",
    "p@ss@word",
    "sl/ash/ed",
    "with space",
    "quo'te\"d",
    "back\\slash",
    "per%40cent",
    "colon:colon",
    "ünï¢ode",
]


@pytest.mark.parametrize(
    "words",
    [
        {"namespace": "t-${KV_TOKEN}"},
        {"salt": "${KV_TOKEN}"},
        {"secondary": [{"type": "local", "path": "/data/${KV_TOKEN}/kv", "capacity": "1MiB"}]},
        {"secondary": [{"type": "tests.test_secrets:LEAKY", "endpoint": "https://host/x?token=${KV_TOKEN}"}]},
        {"secondary": [{"type": "tests.test_secrets:LEAKY", "dsn": "host=db password=${KV_TOKEN} user=kv"}]},
    ],
)
def test_a_printed_stack_never_reads_as_another_stack(words: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_TOKEN", SENTINEL)
    printed = tiering.load_stack({"primary": PRIMARY, **words}).describe()
    assert SENTINEL not in printed
    with pytest.raises(tiering.ConfigError, match=r"holds \*\*\*, which stands for a secret"):
        tiering.load_stack(yaml.safe_load(printed))


@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize(
    "fails",
    [
        "build",
        "build_config",
        "location",
        "open",
        "lookup",
        "submit_store",
        "get_finished",
        "shutdown",
        "badvalue",
        "badtype",
    ],
)
def test_a_password_of_a_tier_of_ones_own_is_shown_nowhere(
    password: str, fails: str, written: Callable[[], str]
) -> None:
    words = {
        "endpoint": f"https://user:{password}@host.example:9000/{fails}",
        "dsn": f"host=db user=kv password={quote(password, safe='')}",
        "password": password,
        "session": password,
        "fails": fails,
    }
    ctx, shown = tiering.ReqContext("r1"), ""
    try:
        stack = tiering.load_stack({"primary": PRIMARY, "secondary": [{"type": TYPE, "name": "leaky", **words}]})
        shown += repr(stack) + str(stack) + stack.describe() + repr(stack.secondary[0])
        with tiering.open_manager(stack, 4096, MODEL) as manager:
            manager.on_new_request(ctx)
            manager.match_prefix(KEYS, ctx)
            out = manager.prepare_store(KEYS, ctx)
            assert out is not None
            manager.complete_store(KEYS, ctx)
            manager.on_schedule_end()
            shown += repr(manager.get_stats())
    except tiering.TieringError as error:
        assert fails.startswith(("build", "location", "bad"))
        shown += told(error)
    else:
        assert f"its {fails}" in written()
    shown += written()
    for secret in (password, quote(password, safe=""), repr(password)[1:-1]):
        assert secret not in shown
    assert fails == "badtype" or "host.example" in shown


@pytest.mark.parametrize("kind", [*TIER_TYPES, TYPE])
@pytest.mark.parametrize("form", ["{}", "https://user:{}@host/x?token={}", "${{PLANTED}}"])
def test_a_secret_in_any_text_of_any_tier_is_not_repeated(
    kind: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", f"https://user:{SENTINEL}@host/")
    words = [*tier_definition(kind).options.model_fields, "secret_key", "token", "passwrd_of_mine"]
    for word in words:
        plain = form == "{}"
        if plain and not masking.is_secret(word):
            continue  # no option marks this value as a secret
        for value in (
            form.replace("{}", SENTINEL).replace("{{", "{").replace("}}", "}"),
            [form.replace("{}", SENTINEL)],
        ):
            section = {"type": kind, "no_such_word": 1, **({} if word == "type" else {word: value})}
            if word == "type":
                section["type"] = value
            with pytest.raises(tiering.ConfigError) as caught:
                tiering.load_stack({"primary": PRIMARY, "secondary": [section]})
            assert SENTINEL not in told(caught.value), word


@pytest.mark.parametrize("name", ["DB_PASSWORD", "KV_TOKEN", "AWS_SECRET_ACCESS_KEY"])
def test_a_variable_that_is_named_like_a_secret_is_masked_wherever_it_is_used(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, SENTINEL)
    stack = {
        "primary": PRIMARY,
        "secondary": [{"type": "local", "path": f"relative/${{{name}}}/kv", "capacity": "1MiB"}],
    }
    config = tiering.load_stack(stack)
    assert SENTINEL not in repr(config) + config.describe()
    with pytest.raises(tiering.ConfigError) as caught:
        tiering.load_stack({**stack, "mode": f"${{{name}}}"})
    assert SENTINEL not in told(caught.value)


def test_the_endpoint_of_the_environment_is_masked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://user:{SENTINEL}@127.0.0.1:9000")
    (options,) = tiering.load_stack({"primary": PRIMARY, "secondary": [{"type": "s3", "bucket": "abc"}]}).secondary
    assert tier_definition("s3").location(options) == "s3://abc/ at http://***@127.0.0.1:9000"


@pytest.mark.parametrize(
    "value", ["*hunter2-hunter2", "!hunter2-hunter2", "!!int hunter2-hunter2", "%hunter2-hunter2", "[hunter2-hunter2"]
)
def test_a_password_that_yaml_cannot_read_is_not_repeated(value: str, tmp_path: Any) -> None:
    (tmp_path / "stack.yaml").write_text(f"primary: {{capacity: 1MiB}}\nsalt: {value}\n")
    with pytest.raises(tiering.ConfigError) as caught:
        tiering.load_stack(tmp_path / "stack.yaml")
    assert "not valid YAML" in str(caught.value)
    assert SENTINEL not in told(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no answer from redis://:pw@host:6379/0", "no answer from redis://***@host:6379/0"),
        ("postgres://u:p@ss@host/db, again", "postgres://***@host/db, again"),
        ("dial user:pw@host", "dial ***@host"),
        ("AccountName=a;AccountKey=bcd==;x=1", "AccountName=a;AccountKey=***;x=1"),
        ("host=db password=pw port=1", "host=db password=*** port=1"),
        ("https://host/a?key=k1&b=2", "https://host/a?key=***&b=2"),
        ("secondary[0].path (line 3): '/a/b' is not allowed: it should be a text", None),
        ("s3://bucket/prefix/ at http://127.0.0.1:9000 (line 4): 10:30", None),
    ],
)
def test_what_looks_like_a_secret_is_masked_and_nothing_else(text: str, expected: str | None) -> None:
    assert mask_text(text) == (text if expected is None else expected)


def test_a_record_that_cannot_be_formatted_is_left_to_the_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("kv_tiering.leaky")
    guard_logs()
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logger.warning("%d blocks", "many")


@pytest.mark.parametrize(
    "piece", ["x", "//", "//:", "://a:b", "?", "&key", "token", "passw=", "a:", "a@", ".", "=", "://a@"]
)
def test_a_long_text_is_searched_in_time_that_grows_with_its_length_only(piece: str) -> None:
    """A search with quadratic time would take hours, so that the test would run into its time limit."""
    assert mask_text(piece * (300_000 // len(piece)))


def test_very_short_secrets_do_not_garble_every_text() -> None:
    for value in ("a", "true", "4096", "10.5GiB"):
        masking.record_secrets("token", value)
    text = "tier local: a block of 4096 bytes, 10.5GiB, is true"
    assert mask_text(text) == text


def test_what_is_learnt_is_bounded() -> None:
    learnt = masking._Learnt()
    for number in range(500):
        learnt.add(f"{number:04}" * 200)
    assert sum(map(len, learnt.longest_first)) <= 256 << 10
    assert "0499" * 200 in learnt.longest_first
    assert "0000" * 200 not in learnt.longest_first


def test_the_secrets_of_a_running_tier_are_masked_after_many_other_stacks_were_read() -> None:
    masking.record_secrets("password", SENTINEL)
    for number in range(300):
        masking.record_secrets("endpoint", f"https://user-{number}:password-of-{number}@host-{number}/")
    assert SENTINEL not in mask_text(f"no answer with {SENTINEL}")


def test_a_path_of_an_own_tier_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_TOKEN", SENTINEL)
    section = {"type": TYPE, "name": "leaky", "file": "/data/${KV_TOKEN}/kv"}
    stack = tiering.load_stack({"primary": PRIMARY, "secondary": [section]})
    assert SENTINEL not in repr(stack) + str(stack) + stack.describe()


def test_the_credentials_in_the_place_of_a_stack_file_are_not_repeated() -> None:
    with pytest.raises(tiering.ConfigError) as caught:
        tiering.load_stack(f"http://user:{SENTINEL}@host/stack.yaml")
    assert SENTINEL not in told(caught.value)
