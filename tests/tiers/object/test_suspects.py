"""Objects that a machine reads corrupt: nothing shared is deleted on one machine's word."""

from __future__ import annotations

import asyncio
import datetime
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fake_s3 import FakeS3
from tests.tiers.object.lying_proxy import Lie, lying_proxy
from tests.tiers.object.rigs import Make, block_names, lines, tier_of
from tiering.admin.records import Limits
from tiering.cli.inspect import TierContent, print_contents, read_content
from tiering.errors import TemporaryStoreError
from tiering.medium.block_store import RawBlock, Settlement
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import K
from tiers.object import S3Options
from tiers.object.command import ObjectAdmin
from tiers.object.suspects import BUDGET, MOST_BLOCKS, MOST_NAMES, NOTE_SECONDS, Machine, Note, SecondNames, Suspects

NO_DIGEST = {"sse": "aws:kms"}
"""Options of a bucket whose ETags are no MD5."""

MINUTE = datetime.timedelta(minutes=1)


@pytest.fixture(autouse=True)
def clock(fake: FakeS3) -> None:
    fake.now = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)


def pass_time(fake: FakeS3, time: datetime.timedelta) -> None:
    assert fake.now is not None
    fake.now += time


def machine(make: Make, number: int, **words: object) -> TierRig:
    """Return an open tier on the machine with this number."""
    rig = make(**words).open()
    tier_of(rig)._store._suspects._machine = Machine.of(f"id {number}", f"boot {number}", f"host {number}")
    return rig


def damage(fake: FakeS3, names: list[str]) -> None:
    with fake.lock:
        for name in names:
            body = fake.objects[name]
            fake.objects[name] = body[:-1] + bytes([body[-1] ^ 1])


def notes(fake: FakeS3) -> list[str]:
    return fake.names("documents/suspect-")


def settlements(fake: FakeS3) -> list[str]:
    return fake.names("documents/settled-")


def read_corrupt(rig: TierRig, caplog: pytest.LogCaptureFixture, verdict: str) -> None:
    """Load a block that is corrupt, and wait until the tier has come to ``verdict``."""
    caplog.clear()
    assert rig.load(K[:1]) == []
    rig.wait(lambda: lines(caplog, verdict))


# ----------------------------------------------------------------------------------------------------- the path's fault


@pytest.mark.parametrize("lie", [Lie.EMPTY, Lie.TOO_LONG, Lie.CUT, Lie.LOGIN_PAGE])
@pytest.mark.parametrize("words", [{}, NO_DIGEST], ids=["digest", "no digest"])
def test_five_machines_behind_a_proxy_that_changes_lengths_delete_nothing(
    fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture, lie: Lie, words: dict[str, object]
) -> None:
    make(**words).open().store(K[:10])
    before = dict.fromkeys(block_names(fake))
    with lying_proxy(fake.endpoint, lie) as proxy:
        sick = [machine(make, number, endpoint_url=proxy.endpoint, **words) for number in range(5)]
        for at, rig in enumerate(sick):
            assert rig.load(K[2 * at : 2 * at + 2]) == []
            rig.wait(lambda at=at: proxy.lies >= 4 * (at + 1))  # type: ignore[misc]
            rig.wait(lambda: lines(caplog, "suspect a proxy") or len(block_names(fake)) < 10)
        for rig in sick:
            assert rig.close()
    assert dict.fromkeys(block_names(fake)) == before
    assert not notes(fake) + settlements(fake)
    assert not lines(caplog, "corrupt on the medium")


def test_a_flipped_bit_in_every_read_deletes_nothing_where_etags_are_no_digests(
    fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    make(**NO_DIGEST).open().store(K[:8])
    before = block_names(fake)
    with lying_proxy(fake.endpoint, Lie.SAME_BIT) as proxy:
        sick = machine(make, 1, endpoint_url=proxy.endpoint, **NO_DIGEST)
        assert sick.load(K[:8]) == []
        sick.wait(lambda: len(notes(fake)) == 8)
        assert sick.close()
        restarted = machine(make, 1, endpoint_url=proxy.endpoint, **NO_DIGEST)
        pass_time(fake, 2 * MINUTE)
        caplog.clear()
        assert restarted.load(K[:8]) == []
        restarted.wait(lambda: lines(caplog, "second name"))
        assert restarted.close()
    assert block_names(fake) == before
    assert make(**NO_DIGEST).open().load(K[:8]) == K[:8]


# --------------------------------------------------------------------------------------------------- the object's fault


def test_without_a_digest_a_second_machine_confirms_the_damage_a_minute_later(
    fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    first = machine(make, 1, **NO_DIGEST)
    first.store(K[:1])
    (name,) = block_names(fake)
    damage(fake, [name])
    read_corrupt(first, caplog, "second name")
    pass_time(fake, MINUTE / 2)
    read_corrupt(machine(make, 2, **NO_DIGEST), caplog, "second name")
    assert block_names(fake) == [name]
    assert not settlements(fake)
    pass_time(fake, MINUTE)
    third = machine(make, 3, **NO_DIGEST)
    read_corrupt(third, caplog, "was deleted")
    assert not block_names(fake)
    assert not notes(fake)
    assert len(settlements(fake)) == 1
    assert third.tier.get_stats().blocks_deleted == 1
    assert third.store(K[:1]) == K[:1]
    assert block_names(fake) == [name]


def test_a_block_whose_object_stays_is_stored_and_found_under_a_second_name(
    fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    first = machine(make, 1, **NO_DIGEST)
    first.store(K[:2])
    name = min(block_names(fake), key=lambda name: K[0].hex() not in name)
    damage(fake, [name])
    read_corrupt(first, caplog, "second name")
    assert first.lookup(K[:1]) == 0
    assert first.store(K[:1]) == K[:1]
    assert sorted(fake.names(K[0].hex())) == [name, f"{name}.1"]
    assert first.load(K[:1]) == K[:1]
    pass_time(fake, MINUTE / 2)
    second = machine(make, 2, **NO_DIGEST)
    read_corrupt(second, caplog, "second name")
    second.wait(lambda: second.lookup(K[:1]) == 1)  # a lookup may end at its deadline without an answer
    asked = len(fake.seen)
    assert second.load(K[:2]) == K[:2]
    assert len(fake.seen) == asked + 2


def test_a_note_that_is_damaged_foreign_or_old_counts_as_none(
    fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    first = machine(make, 1, **NO_DIGEST)
    first.store(K[:1])
    damage(fake, block_names(fake))
    read_corrupt(first, caplog, "second name")
    (note,) = notes(fake)
    sound = fake.objects[note]
    for number, content in enumerate((sound[:-1] + bytes([sound[-1] ^ 1]), b"", b"another program's")):
        fake.objects[note] = content
        pass_time(fake, 2 * MINUTE)
        read_corrupt(machine(make, 2 + number, **NO_DIGEST), caplog, "second name")
        assert Note.parse(fake.objects[note]) is not None
    fake.objects[note] = sound
    pass_time(fake, datetime.timedelta(seconds=NOTE_SECONDS))
    read_corrupt(machine(make, 9, **NO_DIGEST), caplog, "second name")
    assert len(block_names(fake)) == 1
    pass_time(fake, MINUTE)
    read_corrupt(machine(make, 10, **NO_DIGEST), caplog, "was deleted")


def test_a_fleet_deletes_no_more_than_its_budget_in_an_hour(
    fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    writer = make().open()
    writer.store(K[:24])
    damage(fake, block_names(fake))
    for number in range(3):
        rig = machine(make, number)
        assert rig.load(K[8 * number : 8 * number + 8]) == []
        rig.wait(lambda number=number: len(block_names(fake)) == max(24 - 8 * (number + 1), 24 - BUDGET))  # type: ignore[misc]
        if number == 2:
            rig.wait(lambda: lines(caplog, "enough was deleted"))
        assert rig.close()
    assert len(block_names(fake)) == 24 - BUDGET
    assert len(settlements(fake)) == BUDGET
    pass_time(fake, 120 * MINUTE)
    read_corrupt_rest = machine(make, 4)
    assert read_corrupt_rest.load(K[16:24]) == []
    read_corrupt_rest.wait(lambda: not block_names(fake))
    assert len(settlements(fake)) == 8


def test_a_deletion_whose_answer_was_lost_counts(
    fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = machine(make, 1)
    rig.store(K[:1])
    damage(fake, block_names(fake))
    suspects = tier_of(rig)._store._suspects
    delete = suspects._delete

    def lose_the_answer(name: str, version: str) -> bool:
        delete(name, version)
        raise TemporaryStoreError("the connection was reset before an answer")

    monkeypatch.setattr(suspects, "_delete", lose_the_answer)
    read_corrupt(rig, caplog, "before an answer")
    assert len(settlements(fake)) == 1


def test_machines_that_may_not_delete_or_write_use_a_second_name_and_do_not_ask_again(
    fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    rig = machine(make, 1)
    rig.store(K[:2])
    damage(fake, block_names(fake))
    fake.fail(403, method="DELETE", times=1 << 30, code="AccessDenied")
    read_corrupt(rig, caplog, "second name for the block")
    assert lines(caplog, "cannot be deleted")
    assert rig.store(K[:1]) == K[:1]
    assert rig.load(K[:1]) == K[:1]
    deletions = len(fake.asked("DELETE"))
    caplog.clear()
    assert rig.load(K[1:2]) == []
    assert rig.store(K[1:2]) == [] or rig.load(K[1:2]) == K[1:2]
    assert len(fake.asked("DELETE")) == deletions
    reader = machine(make, 2, admission="none")
    written = len(fake.asked("PUT"))
    read_corrupt(reader, caplog, "second name for the block")
    reader.wait(lambda: reader.lookup(K[:1]) == 1)
    assert len(fake.asked("PUT")) == written


@pytest.mark.parametrize("lie", [Lie.LOGIN_PAGE, Lie.SAME_BIT, Lie.CUT, Lie.EMPTY])
def test_a_machine_whose_path_changes_epoch_documents_begins_no_epoch(fake: FakeS3, make: Make, lie: Lie) -> None:
    """A new epoch costs all machines their blocks."""
    sound = make().open()
    sound.store(K[:4])
    documents = set(fake.names("documents/epoch-"))
    with lying_proxy(fake.endpoint, lie, "/documents/epoch-") as proxy:
        sick = make(endpoint_url=proxy.endpoint, breaker={"probe_after": "5ms", "probe_max": "10ms"})
        assert not sick.tier.open(sick.context.clock() + 0.5)
        sick.wait(lambda: proxy.lies >= 12)
        assert set(fake.names("documents/epoch-")) == documents
        proxy.lie = None
        sick.wait(lambda: sick.tier.get_stats().available)
        assert sick.load(K[:4]) == K[:4]
    assert make().open().load(K[:4]) == K[:4]


class Documents:
    """Notes and settlements in memory, whose listings begin when all machines have written."""

    def __init__(self, machines: int) -> None:
        self.times: dict[str, float] = {}
        self.written = threading.Barrier(machines)

    def read_document(self, name: str) -> bytes | None:
        return None

    def write_document(self, name: str, data: bytes) -> None:
        self.times[name] = 1.0
        self.written.wait(10)

    def create_document(self, name: str, data: bytes) -> bytes | None:
        self.times[name] = 1.0
        return data

    def remove_documents(self, names: Sequence[str]) -> None:
        for name in names:
            self.times.pop(name, None)

    def document_times(self) -> Mapping[str, float]:
        return dict(self.times)


@pytest.mark.parametrize("machines", [BUDGET, 3 * BUDGET])
def test_machines_that_settle_at_the_same_moment_stay_within_the_budget(machines: int) -> None:
    documents = Documents(machines)
    found = RawBlock(b"bad", 3, '"v"', proven=True)
    deleted: list[str] = []

    def delete(name: str, version: str) -> bool:
        deleted.append(name)
        return True

    def settle(number: int) -> Settlement:
        return Suspects(documents, delete).settle(str(number), found)

    with ThreadPoolExecutor(machines) as pool:
        ends = list(pool.map(settle, range(machines)))
    assert ends.count(Settlement.DELETED) == len(deleted) <= BUDGET
    assert machines > BUDGET or len(deleted) == BUDGET


def test_a_process_notes_no_more_in_an_hour_than_the_fleet_may_delete() -> None:
    documents, now = Documents(1), 0.0
    suspects = Suspects(documents, lambda name, version: False, clock=lambda: now)
    found = RawBlock(b"bad", 3, '"v"')
    for hour in range(2):
        now = 3600.0 * hour
        ends = [suspects.settle(f"{hour} {number}", found) for number in range(2 * BUDGET)]
        assert set(ends) == {Settlement.LEFT}
        assert len(documents.times) == BUDGET * (hour + 1)


def test_notes_and_deletions_cost_what_the_document_says(
    fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = machine(make, 1, **NO_DIGEST), machine(make, 2, **NO_DIGEST)
    first.store(K[:1])
    damage(fake, block_names(fake))
    look = Counter({"GET": 1}) + Counter({"HEAD": 2, "GET": 2})
    note = Counter({"GET": 3, "PUT": 1})
    deletion = Counter({"GET": 1}) + Counter({"PUT": 1, "GET": 1, "HEAD": 1, "DELETE": 1}) + Counter({"POST": 1})
    for rig, verdict, cost in ((first, "second name", look + note), (second, "was deleted", look + deletion)):
        asked = len(fake.seen)
        read_corrupt(rig, caplog, verdict)
        assert Counter(seen.method for seen in fake.seen[asked:]) == cost
        pass_time(fake, MINUTE)


def test_sound_blocks_cost_no_further_request(fake: FakeS3, make: Make) -> None:
    writer = machine(make, 1)
    asked = len(fake.seen)
    writer.store(K[:4])
    assert writer.load(K[:4]) == K[:4]
    assert Counter(seen.method for seen in fake.seen[asked:]) == {"HEAD": 4, "PUT": 4, "GET": 4}


# ------------------------------------------------------------------------------------------------- documents and names


def test_a_note_with_any_flipped_bit_or_another_length_is_none() -> None:
    note = Note.of("prod/blocks/ns/1", RawBlock(b"bad", 3, '"v"'), Machine.of("a", "b", "c"))
    data = note.pack()
    assert Note.parse(data) == note
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert Note.parse(bytes(flipped)) is None
    for length in range(len(data)):
        assert Note.parse(data[:length]) is None
    assert Note.parse(data + b"\0") is None
    assert Note.of("prod/blocks/ns/1", RawBlock(b"", 3, '"v"'), note.machine) != note


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (("other id", "other boot", "other name"), True),
        (("", "other boot", "other name"), True),
        (("id", "other boot", "other name"), False),
        (("other id", "boot", "other name"), False),
        (("other id", "other boot", "name"), False),
        (("", "", "other name"), False),
        (("", "", ""), False),
    ],
)
def test_another_machine_shares_no_name_with_this_one(other: tuple[str, str, str], differs: bool) -> None:
    this = Machine.of("id", "boot", "name")
    assert this.differs(Machine.of(*other)) is differs
    assert Machine.of(*other).differs(this) is differs


def test_a_process_that_starts_again_is_the_same_machine() -> None:
    assert Machine.this() == Machine.this()
    assert not Machine.this().differs(Machine.this())


def test_second_names_are_bounded_and_end() -> None:
    now = 0.0
    names = SecondNames(lambda: now)
    for number in range(1, MOST_NAMES + 1):
        assert names.add("a")
        assert names.suffix("a") == f".{number}"
    assert not names.add("a")
    assert [names.add(str(number)) for number in range(MOST_BLOCKS)].count(True) == MOST_BLOCKS - 1
    now = 3600.0
    assert names.suffix("a") == ""
    assert names.add("b")
    assert names.suffix("b") == ".1"


def test_inspect_gc_and_clear_know_second_names_and_old_notes(
    fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    rig = machine(make, 1, **NO_DIGEST)
    rig.store(K[:1])
    damage(fake, block_names(fake))
    read_corrupt(rig, caplog, "second name")
    assert rig.store(K[:1]) == K[:1]
    options = S3Options.model_validate({"bucket": fake.bucket, "endpoint_url": fake.endpoint, "prefix": "prod"})

    async def work() -> None:
        with ObjectAdmin(options) as admin:
            assert fake.now is not None
            begun = fake.now.timestamp()
            blocks = [block async for block in admin.blocks()]
            assert len(blocks) == 2
            assert {admin.expected_key(block) for block in blocks} == {bytes(K[0])}
            (namespace,) = {block.namespace for block in blocks}
            admin.clock = lambda: begun + 60.0
            assert (await read_content(admin)).suspects == 1
            await admin.collect(Limits(), dry_run=False)
            assert len(notes(fake)) == 1
            admin.clock = lambda: begun + NOTE_SECONDS
            assert (await read_content(admin)).suspects == 0
            await admin.collect(Limits(), dry_run=True)
            assert len(notes(fake)) == 1
            await admin.collect(Limits(), dry_run=False)
            assert not notes(fake)
            assert (await admin.clear(namespace, dry_run=False)).blocks == 2

    asyncio.run(work())
    assert not block_names(fake)


def test_inspect_says_how_many_objects_are_suspect(capsys: pytest.CaptureFixture[str]) -> None:
    print_contents({"s3": TierContent("here", None, [], suspects=2)})
    assert "s3\tsuspects\t2 objects that one machine reads corrupt" in capsys.readouterr().out
