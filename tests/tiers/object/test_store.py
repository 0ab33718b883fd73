"""Requests of the object store to a server that fails on command."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.fake_s3 import FakeS3, Trouble
from tests.tiers.object.blocks import HEADER_BYTES, block, content, empty
from tiering.errors import CorruptBlockError, PermanentStoreError, StoreError, TemporaryStoreError
from tiering.medium.block_store import Done
from tiers.object.bucket_options import S3Options
from tiers.object.sender import Verb
from tiers.object.store import LOOKS_AFTER_REFUSAL, ObjectStore

Open = Callable[..., ObjectStore]
NAME = "prod/blocks/ns/ab/abcd"
PLACE = "ns/ab/abcd"


def failure_of(call: Callable[[], object]) -> StoreError:
    with pytest.raises(StoreError) as caught:
        call()
    return caught.value


class TestPut:
    def test_writes_header_and_payload_as_one_object(self, fake: FakeS3, open_store: Open) -> None:
        sent = block(PLACE)
        open_store().put_one(sent)
        assert fake.objects[NAME] == content(sent)
        assert len(fake.asked("PUT")) == 1

    def test_does_not_upload_an_object_that_is_there(self, fake: FakeS3, open_store: Open) -> None:
        fake.objects[NAME] = b"there"
        open_store().put_one(block(PLACE))
        assert fake.objects[NAME] == b"there"
        assert not fake.asked("PUT")

    def test_lets_the_service_refuse_to_replace_what_came_in_between(self, fake: FakeS3, open_store: Open) -> None:
        store = open_store(check_existing=False)
        store.put_one(block(PLACE, seed=1))
        first = fake.objects[NAME]
        assert store.put([block(PLACE, seed=2)]) == [Done.DONE]
        assert fake.objects[NAME] == first
        assert fake.asked("PUT")[-1].headers["if-none-match"] == "*"

    def test_after_a_refused_put_the_next_ones_look_first(self, fake: FakeS3, open_store: Open) -> None:
        """Another machine has stored the same prompt since both have looked for it in vain.

        Before there was this rule, all 64 puts were refused, with 64 bodies, for 320 instead of 30 millionths of a
        dollar.
        """
        one, two = open_store(), open_store()
        places = [f"ns/ab/{number:04x}" for number in range(64)]
        for store in (one, two):
            store.expect_absent(places)
        for place in places:
            one.put_one(block(place))
        sent = block(places[0])
        for place in places:
            two.put_one(block(place))
        assert (two.requests.sent[Verb.PUT], two.requests.sent[Verb.HEAD], two.requests.conflicts) == (1, 63, 1)
        assert two.requests.refused_bytes == len(content(sent))
        assert one.requests.sent[Verb.HEAD] == 0

    def test_the_looks_end_where_nothing_is_found(self, open_store: Open) -> None:
        """They cost less than one more refused put."""
        one, two = open_store(), open_store()
        places = [f"ns/ab/{number:04x}" for number in range(64)]
        two.expect_absent(places)
        one.put_one(block(places[0]))
        for place in places:
            two.put_one(block(place))
        assert (two.requests.sent[Verb.PUT], two.requests.sent[Verb.HEAD]) == (64, LOOKS_AFTER_REFUSAL)

    def test_a_conflict_is_stored_only_if_the_object_is_there_afterwards(self, fake: FakeS3, open_store: Open) -> None:
        store = open_store(check_existing=False)
        fake.fail(409, method="PUT", part=PLACE, code="ConditionalRequestConflict")
        assert isinstance(failure_of(lambda: store.put_one(block(PLACE))), TemporaryStoreError)
        assert len(fake.asked("HEAD")) == 1
        fake.objects[NAME] = b"stored by the other request"
        fake.fail(409, method="PUT", part=PLACE, code="ConditionalRequestConflict")
        store.put_one(block(PLACE))
        assert len(fake.asked("HEAD")) == 2

    def test_replaces_when_nothing_is_to_be_checked(self, fake: FakeS3, open_store: Open) -> None:
        store = open_store(check_existing=False, conditional_put=False)
        store.put_one(block(PLACE, seed=1))
        newer = block(PLACE, seed=2)
        store.put_one(newer)
        assert fake.objects[NAME] == content(newer)
        assert not fake.asked("HEAD")

    def test_asks_for_server_side_encryption(self, fake: FakeS3, open_store: Open) -> None:
        open_store(sse="aws:kms", sse_kms_key_id="key-1").put_one(block(PLACE))
        headers = fake.asked("PUT")[0].headers
        assert headers["x-amz-server-side-encryption"] == "aws:kms"
        assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"

    def test_asks_for_no_encryption_by_default(self, fake: FakeS3, open_store: Open) -> None:
        open_store().put_one(block(PLACE))
        assert "x-amz-server-side-encryption" not in fake.asked("PUT")[0].headers

    def test_does_not_hash_the_payload_for_the_signature(self, fake: FakeS3, open_store: Open) -> None:
        open_store().put_one(block(PLACE))
        assert fake.asked("PUT")[0].headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"

    def test_lets_go_of_the_row_when_it_returns(self, open_store: Open) -> None:
        row = bytearray(4096)
        sent = block(PLACE)
        sent.payload = memoryview(row)
        open_store().put_one(sent)
        sent.payload.release()
        gc.collect()
        row.append(0)  # raises BufferError while a memoryview of the row exists


class TestGet:
    def test_fills_both_buffers(self, fake: FakeS3, open_store: Open) -> None:
        sent, got = block(PLACE), empty(PLACE)
        fake.objects[NAME] = content(sent)
        assert open_store().get_one(got) is Done.DONE
        assert content(got) == content(sent)
        assert got.filled == 4096

    def test_says_how_much_of_a_shorter_block_there_was(self, fake: FakeS3, open_store: Open) -> None:
        got = empty(PLACE)
        fake.objects[NAME] = content(block(PLACE, 1000))
        assert open_store().get_one(got) is Done.DONE
        assert got.filled == 1000
        assert bytes(got.payload[1000:]) == bytes(3096)

    def test_absence_is_no_error(self, open_store: Open) -> None:
        assert open_store().get([empty(PLACE)]) == [Done.ABSENT]

    @pytest.mark.parametrize("length", [0, HEADER_BYTES - 1, HEADER_BYTES + 4097])
    def test_an_object_of_an_impossible_length_is_corrupt(self, fake: FakeS3, open_store: Open, length: int) -> None:
        fake.objects[NAME] = bytes(length)
        got = empty(PLACE)
        assert isinstance(open_store().get([got])[0], CorruptBlockError)
        assert content(got) == bytes(HEADER_BYTES + 4096)

    def test_a_body_that_ends_early_is_temporary_and_leaves_the_row_alone(self, fake: FakeS3, open_store: Open) -> None:
        fake.objects[NAME] = content(block(PLACE))
        fake.fail(Trouble.CUT_BODY, method="GET", part=PLACE)
        got = empty(PLACE)
        store = open_store()
        assert isinstance(store.get([got])[0], TemporaryStoreError)
        assert content(got) == bytes(HEADER_BYTES + 4096)
        assert store.get([got]) == [Done.DONE]


class TestErrors:
    @pytest.mark.parametrize("trouble", [500, 502, 503, 504, 429, 408, 409, Trouble.RESET])
    def test_what_may_pass_is_temporary(self, fake: FakeS3, open_store: Open, trouble: int | Trouble) -> None:
        store = open_store(conditional_put=False)
        fake.objects[NAME] = content(block(PLACE))
        fake.fail(trouble, part="prod/", times=3)
        assert isinstance(failure_of(lambda: store.get_one(empty(PLACE))), TemporaryStoreError)
        assert isinstance(failure_of(lambda: store.put_one(block("ns/other"))), TemporaryStoreError)
        assert isinstance(failure_of(lambda: store.read_document("epoch")), TemporaryStoreError)
        assert store.get_one(empty(PLACE)) is Done.DONE

    @pytest.mark.parametrize("status", [400, 401, 403, 405, 501])
    def test_what_stays_is_permanent(self, fake: FakeS3, open_store: Open, status: int) -> None:
        store = open_store(check_existing=False)
        fake.fail(status, part="blocks/", times=2)
        assert isinstance(failure_of(lambda: store.get_one(empty(PLACE))), PermanentStoreError)
        assert isinstance(failure_of(lambda: store.put_one(block(PLACE))), PermanentStoreError)

    def test_one_attempt_per_call(self, fake: FakeS3, open_store: Open) -> None:
        store = open_store()
        fake.fail(503, part=PLACE, times=1000)
        store.get([empty(PLACE)])
        assert len(fake.asked("GET", PLACE)) == 1

    def test_a_hang_ends_after_the_request_timeout(self, fake: FakeS3, open_store: Open) -> None:
        store = open_store(request_timeout="1s")
        fake.fail(Trouble.HANG, method="GET", part=PLACE)
        assert isinstance(failure_of(lambda: store.get_one(empty(PLACE))), TemporaryStoreError)
        assert fake.hanging.acquire(blocking=False)

    def test_a_put_into_a_bucket_that_has_gone_is_permanent(self, fake: FakeS3, open_store: Open) -> None:
        store = open_store()
        fake.bucket = "another"
        assert isinstance(failure_of(lambda: store.put_one(block(PLACE))), PermanentStoreError)
        assert store.get_one(empty(PLACE)) is Done.ABSENT

    def test_a_failure_in_a_batch_says_nothing_of_the_others(self, fake: FakeS3, open_store: Open) -> None:
        store = open_store()
        fake.fail(503, part="ns/2")
        outcomes = store.put([block("ns/1"), block("ns/2"), block("ns/3")])
        assert outcomes[0] is Done.DONE
        assert isinstance(outcomes[1], TemporaryStoreError)
        assert outcomes[2] is Done.DONE

    def test_errors_fit_on_a_line_and_keep_their_cause(self, fake: FakeS3, open_store: Open) -> None:
        store = open_store()
        fake.fail(500, part=PLACE)
        error = failure_of(lambda: store.get_one(empty(PLACE)))
        assert "\n" not in str(error)
        assert len(str(error)) < 500
        assert NAME in str(error)
        assert error.__cause__ is not None


class TestOpen:
    def test_a_missing_bucket_says_so(self, open_store: Open) -> None:
        error = failure_of(lambda: open_store(bucket="another"))
        assert isinstance(error, PermanentStoreError)
        assert "no such bucket" in str(error)

    def test_refused_credentials_say_so(self, fake: FakeS3, open_store: Open) -> None:
        fake.fail(403)
        error = failure_of(open_store)
        assert isinstance(error, PermanentStoreError)
        assert "credentials" in str(error)

    def test_an_unreachable_endpoint_is_temporary(self, open_store: Open) -> None:
        assert isinstance(failure_of(lambda: open_store(endpoint_url="http://127.0.0.1:1")), TemporaryStoreError)

    def test_succeeds_once_the_trouble_is_over(self, fake: FakeS3, open_store: Open) -> None:
        fake.fail(503)
        store = ObjectStore(S3Options(bucket=fake.bucket, endpoint_url=fake.endpoint))
        failure_of(store.open)
        store.open()
        store.put_one(block(PLACE))
        store.close()
        assert f"blocks/{PLACE}" in fake.objects

    def test_asks_for_next_to_nothing(self, fake: FakeS3, open_store: Open) -> None:
        fake.objects |= {f"prod/blocks/ns/{at:04}": b"x" for at in range(5)}
        open_store()
        assert [(seen.method, seen.query["start-after"]) for seen in fake.seen] == [("GET", ["prod/blocks/~"])]

    def test_a_closed_store_is_a_permanent_error_and_closing_twice_is_none(self, open_store: Open) -> None:
        store = open_store()
        store.close()
        store.close()
        assert isinstance(failure_of(lambda: store.get_one(empty(PLACE))), PermanentStoreError)
        assert store.probe([PLACE]).held == (None,)

    def test_plain_http_needs_an_endpoint_that_says_so(self, fake: FakeS3, open_store: Open) -> None:
        failure_of(lambda: open_store(endpoint_url=fake.endpoint.replace("http://", "https://")))
        assert not fake.seen

    def test_the_endpoint_of_the_stack_wins_over_the_environment(
        self, fake: FakeS3, open_store: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
        open_store().put_one(block(PLACE))
        assert NAME in fake.objects

    def test_the_environment_can_name_the_endpoint(
        self, fake: FakeS3, open_store: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", fake.endpoint)
        open_store(endpoint_url=None).put_one(block(PLACE))
        assert NAME in fake.objects

    def test_a_ca_file_that_cannot_be_read_is_named(self, open_store: Open) -> None:
        assert "/nowhere/ca.pem" in str(failure_of(lambda: open_store(ca_file="/nowhere/ca.pem")))

    def test_virtual_hosted_requests_put_the_bucket_into_the_host(
        self, fake: FakeS3, open_store: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HTTP_PROXY", fake.endpoint)
        open_store(endpoint_url="http://s3.example", path_style=False).put_one(block(PLACE))
        assert NAME in fake.objects
        assert fake.asked("PUT")[0].headers["host"] == "kv-cache.s3.example"


class TestProbe:
    def test_answers_for_several_places_at_once(self, fake: FakeS3, open_store: Open) -> None:
        fake.objects |= {"prod/blocks/ns/1": b"x", "prod/blocks/ns/3": b"x"}
        assert open_store().probe(["ns/1", "ns/2", "ns/3"]).held == (True, False, True)

    def test_what_cannot_be_learnt_is_none(self, fake: FakeS3, open_store: Open) -> None:
        store = open_store()
        fake.objects |= {"prod/blocks/ns/1": b"x"}
        fake.fail(503, method="HEAD", part="ns/2")
        assert store.probe(["ns/1", "ns/2"]).held == (True, None)

    def test_probes_that_hang_end_after_the_request_timeout(self, fake: FakeS3, open_store: Open) -> None:
        store = open_store(request_timeout="1s")
        fake.fail(Trouble.HANG, method="HEAD", times=1000)
        assert store.probe([f"ns/{at}" for at in range(4)]).held == (None,) * 4
        assert len(fake.asked("HEAD")) == 4

    def test_that_hang_do_not_hold_up_the_end_of_the_process(self, fake: FakeS3) -> None:
        fake.fail(Trouble.HANG, method="HEAD", times=1 << 30)
        program = (
            "import sys, threading\n"
            "from tiers.object.bucket_options import S3Options\n"
            "from tiers.object.store import ObjectStore\n"
            f"store = ObjectStore(S3Options(bucket={fake.bucket!r}, endpoint_url={fake.endpoint!r}, "
            "request_timeout=600.0, deadline=600.0))\n"
            "store.open()\n"
            "places = [f'ns/{at}' for at in range(8)]\n"
            "threading.Thread(target=store.probe, args=(places,), daemon=True).start()\n"
            "sys.stdin.readline()\n"
            "store.close()\n"
        )
        child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
        try:
            for _ in range(8):
                assert fake.hanging.acquire(timeout=60)
            child.communicate(b"\n", timeout=60)
            assert child.returncode == 0
        finally:
            child.kill()
            child.communicate()

    def test_of_nothing_is_nothing(self, open_store: Open) -> None:
        assert open_store().probe([]).held == ()


class TestDocuments:
    def test_round_trip(self, open_store: Open) -> None:
        store = open_store()
        assert store.read_document("epoch-1") is None
        store.write_document("epoch-1", b"one")
        store.write_document("epoch-1", b"two")
        assert store.read_document("epoch-1") == b"two"

    def test_lie_apart_from_blocks(self, fake: FakeS3, open_store: Open) -> None:
        open_store().write_document("epoch-1", b"one")
        assert list(fake.objects) == ["prod/documents/epoch-1"]


class TestRemoving:
    def test_delete_ignores_what_is_not_there(self, fake: FakeS3, open_store: Open) -> None:
        fake.objects |= {"prod/blocks/ns/1": b"x", "prod/blocks/ns/2": b"x"}
        open_store().delete(["ns/1", "ns/0"])
        assert list(fake.objects) == ["prod/blocks/ns/2"]
        assert len(fake.asked("POST")) == 1

    def test_one_by_one_for_services_without_bulk_deletes(self, fake: FakeS3, open_store: Open) -> None:
        fake.objects |= {"prod/blocks/ns/1": b"x", "prod/blocks/ns/2": b"x"}
        open_store(bulk_delete=False).delete(["ns/1", "ns/2"])
        assert not fake.objects
        assert len(fake.asked("DELETE")) == 2

    def test_a_listing_has_exactly_what_starts_with_the_prefix(self, fake: FakeS3, open_store: Open) -> None:
        others = {
            "prod/blocks/ns/e2/c": b"x",
            "prod/blocks/ns/e10/d": b"x",
            "prod/documents/e1": b"x",
            "other/blocks/ns/e1/a": b"x",
        }
        fake.objects |= {"prod/blocks/ns/e1/a": b"x", "prod/blocks/ns/e1/b": b"x"} | others
        assert list(open_store().list_places("ns/e1/")) == [["ns/e1/a", "ns/e1/b"]]

    def test_a_listing_takes_a_prefix_that_ends_within_a_name(self, fake: FakeS3, open_store: Open) -> None:
        fake.objects |= {"prod/blocks/ns/e1/a": b"x", "prod/blocks/ns/e2/b": b"x"}
        assert list(open_store().list_places("ns/e1")) == [["ns/e1/a"]]

    def test_a_place_outside_the_prefix_cannot_be_named(self, fake: FakeS3, open_store: Open) -> None:
        fake.objects["secret"] = b"x"
        assert isinstance(failure_of(lambda: open_store().delete(["../../secret"])), PermanentStoreError)
        assert fake.objects == {"secret": b"x"}


class TestAccounting:
    def test_every_request_is_counted(self, fake: FakeS3, open_store: Open) -> None:
        store = open_store()
        store.put_one(block(PLACE))
        store.get_one(empty(PLACE))
        store.probe(["ns/1", "ns/2"])
        store.write_document("d", b"x")
        store.delete([PLACE])
        assert store.requests.sent.total() == len(fake.seen)
        assert store.requests.sent == {Verb.LIST: 1, Verb.HEAD: 3, Verb.PUT: 2, Verb.GET: 1, Verb.DELETE: 1}

    def test_no_secret_is_ever_printed(self, fake: FakeS3, open_store: Open, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        store = open_store()
        fake.fail(403, part=PLACE)
        error = failure_of(lambda: store.get_one(empty(PLACE)))
        secret = fake.environment()["AWS_SECRET_ACCESS_KEY"]
        printed = f"{store!r} {store.__dict__!r} {error} {error.__cause__} {caplog.text}"
        assert secret not in printed
