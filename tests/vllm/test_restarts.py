"""Secondary tiers behind the real engine: restarts, new machines, broken media, new weights."""

from __future__ import annotations

import mmap
import shutil
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENT
from tests.servers import RawBucket, S3Endpoint, rclone_server
from tests.vllm.models import write_llama
from tests.vllm.rig import BLOCK, BLOCK_BYTES, Answer, answers_without_tiers, engine, prompt, whole_blocks, wrong
from tiering.errors import ConfigError

PROMPTS = [prompt(seed) for seed in range(4)]
LARGE = 2 * BLOCK
CPU = {"capacity": "64MiB"}
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[Answer]:
    return answers_without_tiers(llama, PROMPTS)


def local(path: Path) -> dict[str, Any]:
    return {"type": "local", "path": str(path), "capacity": "64MiB"}


def s3(server: S3Endpoint, bucket: RawBucket) -> dict[str, Any]:
    return {"type": "s3", "bucket": bucket.name, "endpoint_url": server.endpoint, "prefix": "kv/", **PATIENT}


def test_back_from_the_local_disk_after_a_restart_under_another_path_in_larger_blocks_too(
    llama: Path, expected: list[Answer], tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(llama)
    for name, size in [("gpu blocks", BLOCK), ("two gpu blocks", LARGE)]:
        stack = {"primary": CPU, "secondary": [local(tmp_path / name)], "block_size": size}
        with engine(llama, stack, disable_log_stats=False) as first:
            assert wrong(first.ask(PROMPTS), expected) == []
            first.evict()
            answers, loaded = first.loaded(lambda: first.ask(PROMPTS))
            assert wrong(answers, expected) == []
            assert loaded == whole_blocks(PROMPTS, size) * BLOCK_BYTES
            assert first.tier("local")["read_bytes"] == 0
            assert first.came_from(host=whole_blocks(PROMPTS, size) * BLOCK)
        with engine(link, stack, disable_log_stats=False) as second:
            answers, loaded = second.loaded(lambda: second.ask(PROMPTS))
            assert wrong(answers, expected) == []
            assert loaded == whole_blocks(PROMPTS, size) * BLOCK_BYTES
            assert second.tier("local")["read_bytes"] >= loaded
            assert second.came_from(disk=whole_blocks(PROMPTS, size) * BLOCK)


def test_a_new_machine_is_warm_from_the_bucket(
    llama: Path, expected: list[Answer], tmp_path: Path, endpoint: S3Endpoint
) -> None:
    bucket = endpoint.make_bucket("kv-cache")
    stack: dict[str, Any] = {"primary": CPU, "secondary": [local(tmp_path / "old machine"), s3(endpoint, bucket)]}
    with engine(llama, stack, disable_log_stats=False) as old:
        assert wrong(old.ask(PROMPTS), expected) == []
        old.settle()
    assert bucket.names("kv/")
    stack["secondary"][0] = local(tmp_path / "new machine")
    with engine(llama, stack, disable_log_stats=False) as new:
        answers, loaded = new.loaded(lambda: new.ask(PROMPTS))
        assert wrong(answers, expected) == []
        assert loaded == whole_blocks(PROMPTS) * BLOCK_BYTES
        assert new.tier("s3")["read_bytes"] >= loaded
        assert new.came_from(external_unspecified=whole_blocks(PROMPTS) * BLOCK)
        assert new.tier("local")["read_bytes"] == 0


def test_a_bucket_that_dies_in_the_middle_changes_no_answer(
    llama: Path, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as opened:
        with rclone_server() as server:
            for name, value in server.environment().items():
                monkeypatch.setenv(name, value)
            tier = s3(server, server.make_bucket("kv-cache"))
            stack = {"primary": {"capacity": "2MiB"}, "secondary": [tier]}
            with engine(llama, stack) as writer:
                assert wrong(writer.ask(PROMPTS), expected) == []
                writer.settle()
            impatient = {**tier, "deadline": "10s", "lookup_deadline": "5s", "retries": {"attempts": 1}}
            reader = opened.enter_context(engine(llama, {**stack, "secondary": [impatient]}))
            assert wrong(reader.ask(PROMPTS[:2]), expected[:2]) == []
            read = reader.tier("s3")["read_bytes"]
            assert read >= whole_blocks(PROMPTS[:2]) * BLOCK_BYTES
        for _ in range(2):
            assert wrong(reader.ask(PROMPTS), expected) == []
            reader.evict()
        assert reader.tier("s3")["read_bytes"] == read
        assert reader.tier("s3")["breaker_opened"] + reader.tier("s3")["promotions_failed"] > 0


def test_blocks_damaged_on_disk_are_misses(llama: Path, expected: list[Answer], tmp_path: Path) -> None:
    stack = {"primary": CPU, "secondary": [local(tmp_path / "disk")]}
    with engine(llama, stack) as first:
        assert wrong(first.ask(PROMPTS), expected) == []
        first.settle()
    assert damage(tmp_path / "disk") > 0
    with engine(llama, stack) as second:
        answers, loaded = second.loaded(lambda: second.ask(PROMPTS))
        assert wrong(answers, expected) == []
        assert second.tier("local")["corrupt_blocks"] > 0
        assert loaded < whole_blocks(PROMPTS) * BLOCK_BYTES
        second.evict()
        assert wrong(second.ask(PROMPTS), expected) == []


def damage(directory: Path) -> int:
    """Flip one byte per 100 kB of the data in the segments; return the number of changed bytes."""
    changed = 0
    for file in sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > BLOCK_BYTES):
        with file.open("r+b") as stream:
            for position in range(BLOCK_BYTES // 2, file.stat().st_size, 100_000):
                stream.seek(position)
                value = stream.read(1)
                if value and value != b"\0":
                    stream.seek(position)
                    stream.write(bytes([value[0] ^ 0xFF]))
                    changed += 1
    return changed


def test_new_weights_under_the_same_path_read_nothing_of_the_old_ones(tmp_path: Path) -> None:
    model, stack = tmp_path / "model", {"primary": CPU, "secondary": [local(tmp_path / "disk")]}
    write_llama(model, seed=1)
    old = answers_without_tiers(model, PROMPTS)
    with engine(model, stack) as first:
        assert wrong(first.ask(PROMPTS), old) == []
        first.settle()
    shutil.rmtree(model)
    write_llama(model, seed=2)
    new = answers_without_tiers(model, PROMPTS)
    assert wrong(new, old) == [0, 1, 2, 3]
    with engine(model, stack) as second:
        answers, loaded = second.loaded(lambda: second.ask(PROMPTS))
        assert wrong(answers, new) == []
        assert loaded == 0
        second.settle()
    with engine(model, stack) as third:
        answers, loaded = third.loaded(lambda: third.ask(PROMPTS))
        assert wrong(answers, new) == []
        assert loaded == whole_blocks(PROMPTS) * BLOCK_BYTES


def test_weights_replaced_in_a_running_engine_and_a_reset(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model, other = write_llama(tmp_path / "model", seed=1), write_llama(tmp_path / "other", seed=2)
    weights = load_file(model / "model.safetensors")
    changed = {EMBEDDING: load_file(other / "model.safetensors")[EMBEDDING]}
    save_file({**weights, **changed}, other / "model.safetensors", {"format": "pt"})
    stack = {"primary": CPU, "secondary": [local(tmp_path / "disk")]}
    new = answers_without_tiers(other, PROMPTS)
    with engine(model, stack) as running:
        assert wrong(running.ask(PROMPTS), new) == [0, 1, 2, 3]
        running.settle()
        running.llm.apply_model(lambda served: served.load_weights(changed.items()))
        assert running.llm.reset_prefix_cache(reset_connector=True)
        answers, loaded = running.loaded(lambda: running.ask(PROMPTS))
        assert wrong(answers, new) == []
        assert loaded == 0


@pytest.mark.parametrize("mapped", [False, True], ids=["file", "mapping"])
def test_weights_rewritten_while_the_engine_starts_reach_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mapped: bool
) -> None:
    """Stores through a mapping that was written to before leave all times of the file as they are."""
    from vllm.v1.worker.gpu_worker import Worker

    model, other = write_llama(tmp_path / "model", seed=1), write_llama(tmp_path / "other", seed=2)
    stack = {"primary": CPU, "secondary": [local(tmp_path / "disk")]}
    old, new = answers_without_tiers(model, PROMPTS), answers_without_tiers(other, PROMPTS)
    weights, changed = model / "model.safetensors", (other / "model.safetensors").read_bytes()
    load_model = Worker.load_model

    def load_and_rewrite(worker: Any, *args: Any, **words: Any) -> Any:
        loaded = load_model(worker, *args, **words)
        if mapped:
            mapping[:] = changed
        else:
            weights.write_bytes(changed)
        return loaded

    with weights.open("r+b") as opened:
        mapping = mmap.mmap(opened.fileno(), 0)
    if mapped:
        mapping[:] = weights.read_bytes()
    else:
        mapping.close()
    with closing(mapping), monkeypatch.context() as patched:
        patched.setattr(Worker, "load_model", load_and_rewrite)
        with caplog.at_level("WARNING", "kv_tiering.vllm"), engine(model, stack, disable_log_stats=False) as first:
            assert wrong(first.ask(PROMPTS), old) == []
            first.evict()
            answers, loaded = first.loaded(lambda: first.ask(PROMPTS))
            assert (wrong(answers, old), loaded > 0) == ([], True), "the CPU tier serves"
            assert first.tier("local")["available"] == 0
    assert "changed while the engine started" in caplog.text
    with engine(model, stack, disable_log_stats=False) as second:
        answers, loaded = second.loaded(lambda: second.ask(PROMPTS))
        assert (wrong(answers, new), loaded) == ([], 0)
        second.settle()
        assert second.tier("local")["available"] == 1
    with engine(model, stack, disable_log_stats=False) as third:
        answers, loaded = third.loaded(lambda: third.ask(PROMPTS))
        assert (wrong(answers, new), loaded > 0) == ([], True)


def test_hashes_with_a_random_seed_are_refused_for_tiers_that_outlive_the_process(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with (
        pytest.raises(ConfigError, match="PYTHONHASHSEED"),
        engine(llama, {"primary": CPU, "secondary": [local(tmp_path)]}, prefix_caching_hash_algo="xxhash"),
    ):
        pass
    shutdown_left_overs()


def shutdown_left_overs() -> None:
    """Shut down the remains of an engine that did not start in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()
