"""The stack file: its accepted content, and the errors for invalid content."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.config.stacks import FAKE, PRIMARY, Write, refusal
from tiering.api import masking
from tiering.config.stack_file import StackConfig, load_stack
from tiering.secondary.options import BlockTierOptions


def tier(**words: object) -> dict[str, object]:
    return {"primary": PRIMARY, "secondary": [{"type": FAKE, **words}]}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "stack.yaml"
        path.write_text(text)
        return path

    return write


# -------------------------------------------------------------------------------------------------------------- reading


def test_a_file_and_a_mapping_of_the_same_words_are_the_same_stack(write: Write) -> None:
    stack = {
        "primary": {"capacity": "8GiB", "eviction": "arc"},
        "secondary": [{"type": FAKE, "capacity": "500GB", "deadline": "2m"}],
    }
    assert load_stack(write(yaml.safe_dump(stack))) == load_stack(stack)


def test_sizes_and_durations_are_written_as_people_write_them() -> None:
    stack = load_stack(
        {"primary": {"capacity": "8GiB"}, "shutdown_deadline": "1m", "secondary": [{"type": FAKE, "deadline": "500ms"}]}
    )
    (options,) = stack.secondary
    assert isinstance(options, BlockTierOptions)
    assert (stack.primary.capacity, stack.shutdown_deadline, options.deadline) == (8 << 30, 60.0, 0.5)


def test_a_stack_needs_no_secondary_tier(write: Write) -> None:
    assert load_stack({"primary": PRIMARY}).secondary == ()
    assert load_stack(write("primary: {capacity: 1MiB}\nsecondary:\n")).secondary == ()


def test_tiers_keep_the_order_of_the_file() -> None:
    names = [{"type": FAKE, "name": name} for name in ("fast", "slow", "slowest")]
    assert [tier.tier_name for tier in load_stack({"primary": PRIMARY, "secondary": names}).secondary] == [
        "fast",
        "slow",
        "slowest",
    ]


def test_a_tier_of_ones_own_is_named_by_its_definition_or_by_its_class() -> None:
    by_class = load_stack({"primary": PRIMARY, "secondary": [{"type": "tests.fake_tier:FakeTier", "path": "/a"}]})
    by_definition = load_stack({"primary": PRIMARY, "secondary": [{"type": FAKE, "path": "/a"}]})
    assert type(by_class.secondary[0]) is type(by_definition.secondary[0])


def test_what_is_written_as_yaml_again_is_the_same_stack() -> None:
    stack = load_stack({"primary": PRIMARY, "secondary": [{"type": FAKE, "path": "/a", "retries": {"attempts": 2}}]})
    assert load_stack(yaml.safe_load(stack.describe())) == stack


def test_a_stack_can_be_checked_against_a_json_schema() -> None:
    assert {"primary", "secondary", "namespace"} <= StackConfig.model_json_schema()["properties"].keys()


@pytest.mark.parametrize("lazy", [False, True])
def test_a_stack_chooses_the_simple_scheduler_and_when_it_stores(write: Write, lazy: Any) -> None:
    stack = load_stack(
        write(f"mode: simple\nlazy_offload: {str(lazy).lower()}\nevents: true\nprimary: {{capacity: 1MiB}}\n")
    )
    assert (stack.mode, stack.lazy_offload, stack.events) == ("simple", lazy, True)


def test_the_mode_is_tiering_unless_a_stack_says_otherwise() -> None:
    stack = load_stack({"primary": PRIMARY})
    assert (stack.mode, stack.lazy_offload) == ("tiering", False)


# ---------------------------------------------------------------------------------------------------------- environment


def test_references_are_expanded_also_unquoted_within_braces(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_ENDPOINT", "http://127.0.0.1:9000/x?a={b}, c: d # e")
    stack = load_stack(
        write(f"primary: {{capacity: 1MiB}}\nsecondary:\n  - {{type: '{FAKE}', endpoint: ${{KV_ENDPOINT}}, name: x}}\n")
    )
    assert (stack.secondary[0].endpoint, stack.secondary[0].name) == ("http://127.0.0.1:9000/x?a={b}, c: d # e", "x")  # type: ignore[attr-defined]


def test_a_default_is_used_for_a_variable_that_is_unset_or_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KV_SIZE", raising=False)
    assert load_stack({"primary": {"capacity": "${KV_SIZE:-2MiB}"}}).primary.capacity == 2 << 20
    monkeypatch.setenv("KV_SIZE", "")
    assert load_stack({"primary": {"capacity": "${KV_SIZE:-2MiB}"}}).primary.capacity == 2 << 20
    monkeypatch.setenv("KV_SIZE", "3MiB")
    assert load_stack({"primary": {"capacity": "${KV_SIZE:-2MiB}"}}).primary.capacity == 3 << 20


def test_two_dollars_are_a_literal_one(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_NAME", "x")
    path = write("primary: {capacity: 1MiB}\nnamespace: $${KV_NAME}/$$/$/${KV_NAME}\n")
    assert load_stack(path).namespace == "${KV_NAME}/$/$/x"


def test_a_variable_cannot_bring_structure_into_the_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_NAME", "x\nevents: true\n")
    stack = load_stack(write("primary: {capacity: 1MiB}\nnamespace: ${KV_NAME}\n"))
    assert stack.events is False
    assert stack.namespace == "x\nevents: true\n"


def test_a_missing_variable_is_named_with_the_field_and_its_line(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KV_SIZE", raising=False)
    text = refusal(write("# sizes\nprimary:\n  capacity: ${KV_SIZE}\n"))
    assert "primary.capacity (line 3): the environment variable KV_SIZE is not set" in text
    assert "is not a size" not in text


def test_a_reference_in_a_comment_is_not_resolved(write: Write) -> None:
    assert load_stack(write("primary: {capacity: 1MiB} # ${KV_NOT_SET_ANYWHERE}\n")).primary.capacity == 1 << 20


def test_a_malformed_reference_is_refused() -> None:
    assert "namespace: ${1:} is not an environment reference" in refusal({"primary": PRIMARY, "namespace": "${1:}"})


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ({"primary": {"capacity": "8 gigs"}}, "primary.capacity: '8 gigs' is not a size; write it like 8GiB"),
        ({"primary": {"capacity": 0}}, "primary.capacity: 0 is not allowed: it should be greater than 0"),
        ({"primary": {}}, "primary.capacity: is missing"),
        ({}, "primary: is missing"),
        ({"primary": 5}, "primary: 5 is not a mapping of capacity, eviction, inclusion"),
        ({"primary": {**PRIMARY, "evicton": "lru"}},
         "primary.evicton: unknown word; did you mean eviction?; allowed are capacity, eviction"),
        ({"primary": {**PRIMARY, "eviction": "mru"}}, "primary.eviction: 'mru' is not a policy; allowed are lru, arc"),
        ({"primary": {**PRIMARY, "inclusion": "both"}},
         "primary.inclusion: 'both' is not allowed: it should be 'inclusive' or 'exclusive'"),
        ({"primary": {**PRIMARY, "inclusion": "exclusive"}, "mode": "simple"},
         "primary.inclusion: has no meaning in mode simple"),
        ({"primary": PRIMARY, "secundary": []}, "secundary: unknown word; did you mean secondary?"),
        ({"primary": PRIMARY, "secondary": {"type": "memory"}},
         "secondary: is a mapping; it must be a list of tiers, fastest first"),
        ({"primary": PRIMARY, "secondary": ["memory"]},
         "secondary[0]: 'memory' is not a mapping; write it like {type: local"),
        ({"primary": PRIMARY, "secondary": [{"path": "/x"}]},
         "secondary[0].type: is missing; allowed are memory, local, object, s3"),
        ({"primary": PRIMARY, "secondary": [{"type": "nvme"}]},
         "secondary[0].type: 'nvme' is not a type of tier; allowed are memory"),
        ({"primary": PRIMARY, "secondary": [{"type": "no_such:T"}]},
         "secondary[0].type: the tier 'no_such:T' cannot be imported"),
        ({"primary": PRIMARY, "secondary": [{"type": "tests.fake_tier:X"}]},
         "secondary[0].type: the module tests.fake_tier has no 'X'"),
        ({"primary": PRIMARY, "secondary": [{"type": "tests.fake_tier:NOT_A_TIER"}]},
         "secondary[0].type: 'tests.fake_tier:NOT_A_TIER' is neither"),
        (tier(capcity="1GiB"),
         "secondary[0].capcity: unknown word; did you mean capacity?; allowed are type, name, required, capacity"),
        (tier(ttl="7d"),
         "secondary[0].ttl: is not supported by tests.fake_tier:FAKE_TIER tiers: this fake does not age"),
        (tier(deadline="7 days"), "secondary[0].deadline: '7 days' is not a duration; write it like 500ms"),
        (tier(admission="some"),
         "secondary[0].admission: 'some' is not allowed: it should be 'all', 'second_touch' or 'none'"),
        (tier(eviction="tests.fake_tier:FakeTier"),
         "secondary[0].eviction: 'tests.fake_tier:FakeTier' is not a subclass"),
        (tier(retries={"attempts": 0}),
         "secondary[0].retries.attempts: 0 is not allowed: it should be greater than or equal to 1"),
        (tier(retries={"atempts": 2}),
         "secondary[0].retries.atempts: unknown word; did you mean attempts?; allowed are attempts, backoff"),
        (tier(retries=3), "secondary[0].retries: 3 is not a mapping of attempts, backoff, backoff_max"),
        (tier(low_watermark=0.9, high_watermark=0.5), "secondary[0]: low_watermark 0.9 is above high_watermark 0.5"),
        (tier(high_watermark=1.5),
         "secondary[0].high_watermark: 1.5 is not allowed: it should be less than or equal to 1"),
        (tier(name="Not A Name"), "secondary[0].name: 'Not A Name' is not allowed"),
        ({"primary": PRIMARY, "mode": "simpler"}, "mode: 'simpler' is not allowed: it should be 'tiering' or 'simple'"),
        ({"primary": PRIMARY, "lazy_offload": True}, "lazy_offload: has a meaning in mode simple only"),
        ({"primary": PRIMARY, "mode": "simple", "lazy_offload": 2}, "lazy_offload: 2 is not allowed"),
        ({"primary": PRIMARY, "mode": "simple", "salt": "x"}, "salt: has no meaning in mode simple; leave it out"),
        ({"primary": PRIMARY, "mode": "simple", "record_trace": {"path": "/var/log/kv"}},
         "record_trace: mode simple records no trace; leave it out, or use mode tiering"),
        ({"primary": PRIMARY, "record_trace": "/var/log/kv"}, "record_trace: "),
        ({"primary": PRIMARY, "record_trace": {"path": "/var/log/kv", "max_size": "2GiB", "max_total": "1GiB"}},
         "raise max_total or lower max_size"),
        ({"primary": PRIMARY, "mode": "simple", "layout": "canonical"}, "layout: has no meaning in mode simple"),
        ({"primary": PRIMARY, "layout": "NHD"}, "layout: 'NHD' is not allowed: it should be 'plain' or 'canonical'"),
        (
            {"primary": PRIMARY, "mode": "simple", "report_cached": True},
            "report_cached: has no meaning in mode simple; leave it out",
        ),
        ({"primary": PRIMARY, "report_cached": 2}, "report_cached: "),
        ({"primary": PRIMARY, "mode": "simple", "explain": {}}, "explain: has no meaning in mode simple; leave it out"),
        ({"primary": PRIMARY, "explain": {"blocks": 7}}, "explain.blocks: 7 is not allowed"),
        ({"primary": PRIMARY, "explain": {"socket": "/run/" + "s" * 103}},
         "explain: socket: its path has 108 bytes; a UNIX socket's has at most 107"),
        ({"primary": PRIMARY, "explain": {}, "secondary": [{"type": "memory", "name": f"m{n}"} for n in range(6)]},
         "explain: follows at most 5 secondary tiers; leave explain out, or some tiers"),
        ({"primary": {**PRIMARY, "eviction": "arc"}, "mode": "simple"},
         "primary.eviction: has no meaning in mode simple"),
        ({**tier(), "mode": "simple"},
         "secondary[0]: mode simple has no secondary tiers; leave them out, or use mode tiering"),
        ([1], "a stack is a path to a YAML file or a mapping, not list"),
    ],
)  # fmt: skip
def test_a_wrong_stack_is_told_the_field_what_was_wrong_and_what_is_allowed(stack: Any, expected: Any) -> None:
    assert expected in refusal(stack)


def test_every_problem_is_reported_at_once_with_its_line(write: Write) -> None:
    text = refusal(
        write(
            "primary: {capacity: much}\n"
            "secondary:\n"
            f"  - {{type: '{FAKE}', ttl: 7d, compression: zstd, capcity: 1GiB}}\n"
            "  - type: nvme\n"
            "opne_deadline: 5\n"
        )
    )
    lines = text.splitlines()
    assert lines[0].endswith("stack.yaml: 6 problems")
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "primary.capacity (line 1)",
        "secondary[0].ttl (line 3)",
        "secondary[0].compression (line 3)",
        "secondary[0].capcity (line 3)",
        "secondary[1].type (line 4)",
        "opne_deadline (line 5)",
    ]


def test_two_tiers_in_one_place_are_refused() -> None:
    stack = {"primary": PRIMARY, "secondary": [{"type": FAKE, "name": name, "path": "/cache"} for name in "ab"]}
    assert "secondary[1]: shares the directory /cache with secondary[0]; two tiers cannot be in one place" in refusal(
        stack
    )


@pytest.mark.parametrize("paths", [("/cache", "/cache/s"), ("/cache/s", "/cache")])
def test_a_tier_inside_another_ones_directory_is_refused(paths: Any) -> None:
    local = [
        {"type": "local", "name": name, "path": path, "capacity": "1GiB"}
        for name, path in zip("ab", paths, strict=True)
    ]
    assert "/cache/s is a part of /cache, which is the place of" in refusal({"primary": PRIMARY, "secondary": local})
    apart = [{**section, "path": path} for section, path in zip(local, ("/cache/s", "/cache/s2"), strict=True)]
    assert len(load_stack({"primary": PRIMARY, "secondary": apart}).secondary) == 2


def test_the_primary_tiers_name_is_not_for_another() -> None:
    stack = {"primary": PRIMARY, "secondary": [{"type": FAKE, "name": "cpu", "path": "/a"}]}
    assert "secondary[0].name: 'cpu' is the name of the primary tier; give this one another" in refusal(stack)


def test_two_tiers_of_one_name_are_refused() -> None:
    stack = {"primary": PRIMARY, "secondary": [{"type": FAKE, "path": path} for path in ("/a", "/b")]}
    assert (
        "secondary[1].name: 'FAKE_TIER' is also the name of secondary[0]; give each tier a name of its own"
        in refusal(stack)
    )


# ----------------------------------------------------------------------------------------------------------------- YAML


def test_a_key_given_twice_is_refused_with_both_lines(write: Write) -> None:
    assert "primary.capacity (line 3): is given twice, on lines 2 and 3" in refusal(
        write("primary:\n  capacity: 1MiB\n  capacity: 2MiB\n")
    )


def test_yaml_cannot_make_objects(write: Write, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    assert "not valid YAML" in refusal(write(f"primary: !!python/object/apply:os.mkdir ['{witness}']\n"))
    assert not witness.exists()


def test_broken_yaml_is_told_where(write: Write) -> None:
    assert "not valid YAML: mapping values are not allowed here (line 2, column 14)" in refusal(
        write("primary:\n  capacity: 1: 2\n")
    )


def test_aliases_cannot_multiply_without_end(write: Write) -> None:
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
    assert "this is not a stack" in refusal(write("a0: &a0 x\n" + levels))


def test_an_alias_to_itself_is_refused(write: Write) -> None:
    assert "this is not a stack" in refusal(write("primary: &a {capacity: *a}\n"))


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_an_empty_file_is_told_the_least_it_needs(write: Write, text: Any) -> None:
    assert "it needs at least primary: {capacity: 8GiB}" in refusal(write(text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'none.yaml'}: cannot be read: No such file" in refusal(tmp_path / "none.yaml")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read: it is no text in UTF-8 (byte " in refusal(tmp_path / "stack.yaml")


# -------------------------------------------------------------------------------------------------------------- secrets

SECRET = "hunter2-hunter2"


@pytest.mark.parametrize(
    "printed",
    [repr, str, StackConfig.describe, lambda stack: repr(stack.secondary), lambda stack: f"{stack.secondary[0]}"],
)
def test_secrets_are_masked_whenever_a_configuration_is_printed(printed: Any) -> None:
    stack = load_stack(
        {
            "primary": PRIMARY,
            "salt": SECRET,
            "secondary": [
                {
                    "type": FAKE,
                    "access_key": SECRET,
                    "session": SECRET,
                    "endpoint": f"https://user:{SECRET}@store:9000/?token={SECRET}&x=1",
                }
            ],
        }
    )
    text = printed(stack)
    assert SECRET not in text
    if "endpoint" in text:
        assert "store:9000" in text
        assert "x=1" in text


def test_secrets_are_not_repeated_in_refusals() -> None:
    text = refusal(
        tier(access_key=[SECRET], endpoint={"url": f"https://user:{SECRET}@store"}, capacity=f"https://u:{SECRET}@x")
    )
    assert "secondary[0].access_key: *** is not allowed" in text
    assert text.count(SECRET) == 0


# ------------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"secondary": "local"}, "secondary: 'local' is not a list; write it like [{type: local, "),
        ({"primary": None}, "primary: is empty; it must be a mapping of capacity, "),
        ({"primary": "8GiB"}, "; write it like {capacity: 8GiB}"),
        ({"advisor": "maybe"}, "advisor: 'maybe' is not allowed: it should be true or false"),
        (
            {"secondary": [{"type": "lokal"}]},
            "'lokal' is not a type of tier; did you mean local?; allowed are memory, ",
        ),
        (
            {"secondary": [{"type": "memory", "capacity": "1GiB", "fill": "yep"}]},
            "stack: secondary[0].fill: 'yep' is not allowed: it should be 'second_touch', 'all', 'none', true or false",
        ),
        (
            {"secondary": [{"type": "mooncake", "master": "host"}]},
            "Address of Mooncake's master, written like 10.0.0.1:50051 or [::1]:50051",
        ),
        ({"secondary": [{"type": "s3", "bucket": "s3://kv/prod"}]}, "an address is written as type: object with url"),
        ({"secondary": [{"type": FAKE, "name": "a b!"}]}, "name: 'a b!' is not allowed: Name of the tier: at most 32 "),
        ({"secondary": [{"type": "local", "path": "/x", "capacity": "1GiB", "high_watermark": "90%"}]}, "like 0.9"),
    ],
)
def test_a_wrong_form_is_explained_in_words(words: dict[str, object], message: str) -> None:
    refused = refusal({"primary": PRIMARY, **words})
    assert message in refused
    assert not re.search(r"tuple|pattern|pars|``|None", refused)


def test_allowed_words_are_listed_once() -> None:
    refused = refusal({"primary": PRIMARY, "secondary": [{"type": FAKE, "abc": 1, "xyz": 2, "deadlin": 3}]})
    assert (refused.count("unknown word"), refused.count("allowed are")) == (3, 1)
    assert "did you mean deadline?" in refused


def test_tokens_of_a_prompt_are_no_secrets() -> None:
    counts = ("prefill_tokens_per_second", "kv_bytes_per_token", "max_tokens", "prompt_token_count")
    for word in (*counts, "token_ids", "tokenizer"):
        assert not masking.is_secret(word)
        assert masking.mask_text(f"{word}=8000") == f"{word}=8000"
    for word in ("token", "hf_token", "session_token", "auth_tokens", "token_file"):
        assert masking.is_secret(word)
        assert masking.mask_text(f"{word}=hunter2") == f"{word}=***"


def test_a_relative_stack_that_is_missing_names_the_place_it_is_looked_for() -> None:
    said = refusal("none.yaml")
    assert f"none.yaml: cannot be read from the working directory {Path.cwd()}: No such file" in said


# ----------------------------------------------------------------------------------------------------------- warm start


@pytest.mark.parametrize(
    "tiers", [(), ({"type": "memory"},), ({"type": "mooncake", "master": "127.0.0.1:1", "metadata": "http://m"},)]
)
def test_a_warm_start_needs_a_tier_that_keeps_documents(tiers: tuple[dict[str, object], ...]) -> None:
    said = refusal({"primary": PRIMARY, "secondary": list(tiers), "revision": "r1", "warm_start": {}})
    assert "warm_start: needs a secondary tier that outlives the engine and keeps documents" in said


def test_canonical_blocks_need_a_tier_that_keeps_them_for_others() -> None:
    words = {"primary": PRIMARY, "layout": "canonical"}
    text = (
        "layout: canonical serves other and later engines, and no tier keeps blocks for them; add one, or leave it out"
    )
    assert text in refusal(words)
    assert text in refusal({**words, "secondary": [{"type": "memory", "capacity": "1MiB"}]})
    kept = {"type": "local", "path": "/tmp/kv", "capacity": "1GiB"}
    assert load_stack({**words, "secondary": [kept]}).layout == "canonical"
    assert load_stack({**words, "machine": {"socket": "/run/kv.sock", "tiers": ["local"]}}).layout == "canonical"
    assert load_stack({"primary": PRIMARY}).layout == "plain"


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("hints.prefetch", {"hints": {"prefetch": "1MiB"}}),
        ("primary.promote_waiting", {"primary": {**PRIMARY, "promote_waiting": True}}),
    ],
)
def test_promotions_ahead_of_requests_need_a_secondary_tier(where: str, words: dict[str, object]) -> None:
    said = refusal({"primary": PRIMARY, **words})
    assert f"{where}: promotes blocks of secondary tiers, and there are none; add one, or leave it out" in said
    load_stack({"primary": PRIMARY, **words, "secondary": [{"type": "memory", "capacity": "1MiB"}]})


@pytest.mark.parametrize("words", [{"retain": 0.6}, {"pin": -0.1}, {"prefetch": -1}, {"longest": 0}])
def test_bounds_of_hints_are_checked(words: dict[str, object]) -> None:
    assert f"hints.{next(iter(words))}: " in refusal({"primary": PRIMARY, "hints": words})


def test_a_warm_start_has_no_meaning_in_mode_simple() -> None:
    said = refusal({"primary": PRIMARY, "mode": "simple", "warm_start": {}})
    assert "warm_start: has no meaning in mode simple; leave it out" in said


def test_a_warm_start_has_defaults_and_refuses_other_words(tmp_path: Path) -> None:
    disk = {"type": "local", "path": str(tmp_path), "capacity": "1GiB"}
    options = load_stack({"primary": PRIMARY, "secondary": [disk], "warm_start": {}}).warm_start
    assert options is not None
    assert (options.bytes, options.seconds, options.bandwidth) == (None, 120.0, 512 << 20)
    assert load_stack({"primary": PRIMARY, "secondary": [disk]}).warm_start is None
    for wrong in ({"blocks": 1}, {"bandwidth": 0}, {"seconds": 0}, {"bytes": -1}):
        assert "warm_start." in refusal({"primary": PRIMARY, "secondary": [disk], "warm_start": wrong})


# ------------------------------------------------------------------------------------------- the service of the machine

MACHINE = {"socket": "/run/kv-tiering/cache.sock", "tiers": ["local", "s3"]}


def test_a_service_of_the_machine_has_the_tiers_that_are_named() -> None:
    stack = load_stack({"primary": PRIMARY, "machine": MACHINE})
    assert [tier.tier_name for tier in stack.secondary] == ["local", "s3"]
    again = load_stack(yaml.safe_load(stack.describe()))
    assert again == stack
    assert load_stack({"primary": PRIMARY}).machine is None
    words = {"warm_start": {}, "explain": {}, "events": True}
    assert load_stack({"primary": PRIMARY, "machine": MACHINE, **words}).secondary == stack.secondary


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"secondary": [{"type": "memory"}]}, "secondary: cannot be used with machine: the service hosts the tiers"),
        (
            {"explain": {}, "machine": {**MACHINE, "tiers": [*"abcdef"]}},
            "explain: follows at most 5 secondary tiers; leave explain out, or some tiers",
        ),
        ({"mode": "simple"}, "machine: has no meaning in mode simple; leave it out"),
        ({"machine": {**MACHINE, "tiers": ["local", "local"]}}, "machine.tiers[1]: 'local' is also the name of"),
        ({"machine": {**MACHINE, "tiers": ["cpu"]}}, "machine.tiers[0]: 'cpu' is the name of the primary tier"),
        ({"machine": {**MACHINE, "tiers": []}}, "machine.tiers"),
        ({"machine": {**MACHINE, "socket": "/" + "x" * 107}}, "more than 107 bytes"),
        ({"machine": "/run/kv-tiering/cache.sock"}, "machine: '/run/kv-tiering/cache.sock' is not a mapping of"),
        ({"machine": {"tiers": ["local"]}}, "machine.socket: is missing"),
    ],
)
def test_what_does_not_go_with_a_service_is_refused(words: dict[str, object], message: str) -> None:
    assert message in refusal({"primary": PRIMARY, "machine": MACHINE, **words})
