"""The options of a user's own tier: common words that the tier names work, all others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest
from pydantic import ValidationError

from tests.block_tier.fakes import make_context
from tiering import ConfigError, load_stack
from tiering.block_tier.tier import BlockTier
from tiering.config.stack_file import StackConfig
from tiering.index.slots import SlotIndex
from tiering.testing.clock import FakeClock
from tiering.testing.faults import DictStore
from tiering.tier import (
    BlockTierOptions,
    CapacityOptions,
    CompressionOptions,
    SharedOptions,
    SlotOptions,
    TierDefinition,
    TierOptions,
    TtlOptions,
)

OWN = f"{__name__}:OWN"
EVERY_MIXIN = (BlockTierOptions, SlotOptions, SharedOptions, TtlOptions, CompressionOptions)

GIVEN: Mapping[type[TierOptions], Mapping[str, object]] = {
    BlockTierOptions: {
        "admission": "none",
        "fill": False,
        "deadline": "1s",
        "load_deadline": "1s",
        "retries": {"attempts": 2},
        "breaker": {"failures": 2},
        "max_inflight": 2,
        "primary_share": 0.25,
        "min_prefix_blocks": 2,
        "load_or_compute": "auto",
    },
    CapacityOptions: {"capacity": "1GiB"},
    SlotOptions: {"high_watermark": 0.5, "low_watermark": 0.25, "eviction": "arc"},
    SharedOptions: {"present_ttl": "1s", "absent_ttl": "1s", "lookup_deadline": "1s"},
    TtlOptions: {"ttl": "7d"},
    CompressionOptions: {"compression": "zstd"},
}
"""Each common word with a value that is not its default, by the mix-in that defines the word."""

REASONS: Mapping[type[TierOptions], str] = {
    BlockTierOptions: "it has an I/O side of its own, which does not take this word",
    CapacityOptions: "it does not bound the bytes that it uses",
    SlotOptions: "it does not evict blocks",
    SharedOptions: "it does not probe a shared medium",
    TtlOptions: "its blocks do not expire by age",
    CompressionOptions: "it does not compress blocks",
}

WORDS = [(mixin, word, value) for mixin, words in GIVEN.items() for word, value in words.items()]


class OwnOptions(TierOptions):
    """A tier that names no common word."""

    path: str = "/a"


class AllOptions(BlockTierOptions, SlotOptions, SharedOptions, TtlOptions, CompressionOptions):
    """A tier that names all common words."""


class ReasonedOptions(BlockTierOptions):
    """A tier with reasons of its own for refusals, one of them for a word that its base class accepts."""

    unsupported: ClassVar[Mapping[str, str]] = {"ttl": "sand does not age", "fill": "it is filled by hand"}


def _definition(options: type[TierOptions]) -> TierDefinition:
    return TierDefinition(options, lambda options, context: pytest.fail("nothing is built"), persistent=False)


OWN_TIER = _definition(OwnOptions)
ALL_TIER = _definition(AllOptions)
REASONED_TIER = _definition(ReasonedOptions)


def stack(kind: str, **words: object) -> StackConfig:
    return load_stack(
        {"primary": {"capacity": "1MiB"}, "secondary": [{"type": f"{__name__}:{kind}", "name": "own", **words}]}
    )


def test_every_common_word_is_given_here() -> None:
    words = {word for mixin in EVERY_MIXIN for word in mixin.model_fields} - TierOptions.model_fields.keys()
    assert words == {word for _, word, _ in WORDS}


@pytest.mark.parametrize(("mixin", "word", "value"), WORDS, ids=[word for _, word, _ in WORDS])
def test_a_tier_refuses_a_common_word_that_it_forgot(mixin: type[TierOptions], word: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        stack("OWN_TIER", **{word: value})
    assert str(caught.value) == (
        f"stack: secondary[0].{word}: is not supported by {__name__}:OWN_TIER tiers: {REASONS[mixin]}"
    )
    with pytest.raises(ValidationError, match=f"{word} is not supported by this tier: {REASONS[mixin]}"):
        OwnOptions.model_validate({"type": OWN, word: value})


@pytest.mark.parametrize(("mixin", "word", "value"), WORDS, ids=[word for _, word, _ in WORDS])
def test_a_mixin_brings_its_words(mixin: type[TierOptions], word: str, value: object) -> None:
    (options,) = stack("ALL_TIER", **{word: value}).secondary
    field = mixin.model_fields[word]
    assert getattr(options, word) != field.default


@pytest.mark.parametrize("kind", ["OWN_TIER", "ALL_TIER"])
def test_the_default_of_a_common_word_asks_for_nothing(kind: str) -> None:
    words = {word: AllOptions.model_fields[word].default for _, word, _ in WORDS if word not in {"retries", "breaker"}}
    del words["capacity"], words["ttl"]  # None cannot be written as a size or a duration
    assert stack(kind, **words) == stack(kind)


def test_all_forgotten_words_are_reported_together() -> None:
    with pytest.raises(ConfigError, match=r"2 problems(.|\n)*\.ttl: (.|\n)*\.capacity: "):
        stack("OWN_TIER", ttl="7d", capacity="1GiB")


def test_a_tier_has_the_words_that_it_names_and_no_others() -> None:
    assert set(OwnOptions.model_fields) == {"type", "name", "required", "path"}
    with pytest.raises(ConfigError, match=r"allowed are type, name, required, path$"):
        stack("OWN_TIER", pith="/b")


@pytest.mark.parametrize(("word", "reason"), [("ttl", "sand does not age"), ("fill", "it is filled by hand")])
def test_a_tier_gives_a_reason_of_its_own(word: str, reason: str) -> None:
    value = {"ttl": "7d", "fill": False}[word]
    with pytest.raises(ConfigError, match=f"REASONED_TIER tiers: {reason}"):
        stack("REASONED_TIER", **{word: value})


@pytest.mark.parametrize(("options", "capacity"), [(OwnOptions, None), (AllOptions, 1 << 30)])
def test_only_a_bounded_tier_has_a_capacity(options: type[TierOptions], capacity: int | None) -> None:
    given = {} if capacity is None else {"capacity": capacity}
    assert options.model_validate({"type": OWN, **given}).capacity_bytes == capacity


def test_a_block_tier_whose_options_lack_its_words_says_what_to_derive_from() -> None:
    options: BlockTierOptions = OwnOptions(type=OWN)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"OwnOptions, lack the words.*derive the class from .*BlockTierOptions"):
        BlockTier(make_context(FakeClock()), options, DictStore(), SlotIndex(4))


def test_the_mixin_alone_makes_a_block_tier_compress() -> None:
    context = make_context(FakeClock())
    for store, options in ((DictStore(variable_size=True), AllOptions), (DictStore(), BlockTierOptions)):
        BlockTier(context, options(type=OWN), store, SlotIndex(4))
    with pytest.raises(ConfigError, match="compression: this medium has blocks of a fixed size"):
        BlockTier(context, AllOptions(type=OWN, compression="zstd"), DictStore(), SlotIndex(4))


def test_a_word_that_credit_has_replaced_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValidationError, match="max_queued is not supported by this tier: replaced by credit; delete"):
        BlockTierOptions.model_validate({"type": "own", "max_queued": "1GiB"})
