"""The identity of a model in vLLM's connector: weights and settings, but not the spelling of its path.

No vLLM is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_documents import ROOT
from tests.thread_limit import ThreadLimit
from tiering.api.namespace import ModelIdentity
from tiering.engines.vllm.built import UNKNOWN, settings_mark
from tiering.engines.vllm.hub_cache import is_as_downloaded
from tiering.engines.vllm.identification import Identification, note_files
from tiering.engines.vllm.identity import overrides
from tiering.engines.vllm.weights import (
    digest_of_files,
    draft_identity,
    files_seen,
    has_writer,
    unproven,
    weights_identity,
)
from tiering.errors import ConfigError, PermanentStoreError, TemporaryStoreError
from tiering.testing.clock import until

COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "f" * 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "rope_theta": 10000,
    "_name_or_path": "org/model",
    "transformers_version": "5.0",
}
AUTO = SimpleNamespace(load_format="auto")


def write_model(directory: Path, weights: bytes = b"weights", **config: Any) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def write_snapshot(cache: Path, name: str = "org--model", commit: str = COMMIT) -> Path:
    """Write a model in the layout of the Hugging Face cache; return the directory of the commit.

    Its files are links to blobs.
    """
    written, snapshot = write_model(cache / "written"), cache / f"models--{name}" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in written.iterdir():
        link_to_blob(snapshot / file.name, file.read_bytes())
    shutil.rmtree(written)
    return snapshot


def link_to_blob(link: Path, content: bytes) -> None:
    """Write ``content`` as a blob of the cache, and link to it from a snapshot."""
    blobs = next(parent for parent in link.parents if parent.name == "snapshots").parent / "blobs"
    blobs.mkdir(exist_ok=True)
    link.parent.mkdir(exist_ok=True)
    blob = blobs / hashlib.sha256(content).hexdigest()
    blob.write_bytes(content)
    link.symlink_to(blob)


def model(path: object, **words: Any) -> Any:
    """Return vLLM's configuration of a model."""
    config = SimpleNamespace(to_dict=lambda: dict(CONFIG), architectures=CONFIG["architectures"], _commit_hash=None)
    return SimpleNamespace(
        **{"model": str(path), "revision": None, "hf_config": config, "seed": 0, "max_model_len": 4096, **words}
    )


def known_commit(commit: str) -> Any:
    return SimpleNamespace(to_dict=lambda: {**CONFIG, "_commit_hash": commit}, architectures=None, _commit_hash=commit)


def identity(path: object, **words: Any) -> str:
    return weights_identity(model(path, **words), AUTO)


def test_the_same_files_under_another_path_or_through_a_link_are_the_same_model(tmp_path: Path) -> None:
    first = write_model(tmp_path / "first")
    shutil.copytree(first, tmp_path / "copy")
    (tmp_path / "link").symlink_to(first)
    (tmp_path / "above").symlink_to(tmp_path)
    paths = [
        first,
        tmp_path / "copy",
        tmp_path / "link",
        tmp_path / "above" / "first",
        tmp_path / "copy" / ".." / "first",
    ]
    assert len({identity(path) for path in paths}) == 1


def test_a_repository_is_the_same_by_name_by_revision_by_its_place_in_the_cache_and_through_a_link(
    tmp_path: Path,
) -> None:
    snapshot = write_snapshot(tmp_path / "cache")
    (tmp_path / "link").symlink_to(snapshot)
    auto = SimpleNamespace(load_format="auto", download_dir=str(tmp_path / "cache"))
    names = [model("org/model", hf_config=known_commit(COMMIT)), model("org/model", revision=COMMIT)]
    assert (
        len({*(weights_identity(name, auto) for name in names), identity(snapshot), identity(tmp_path / "link")}) == 1
    )
    assert identity("org/model", revision=COMMIT) == f"commit {COMMIT}"  # not in any cache: read from elsewhere


def test_parts_of_one_commit_are_different_models(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "cache")
    link_to_blob(snapshot / "small" / "model.safetensors", b"small")
    link_to_blob(snapshot / "large" / "model.safetensors", b"large")
    (snapshot / "q4.gguf").symlink_to(snapshot / "model.safetensors")
    (snapshot / "q8.gguf").symlink_to(snapshot / "model.safetensors")
    parts = [snapshot, snapshot / "small", snapshot / "large", snapshot / "q4.gguf", snapshot / "q8.gguf"]
    assert len({identity(path) for path in parts}) == len(parts)


def test_files_below_a_linked_directory_belong_to_the_model(tmp_path: Path) -> None:
    path, part = write_model(tmp_path / "model"), write_model(tmp_path / "part", b"part")
    (path / "part").symlink_to(part)
    (path / "loop").symlink_to(path)
    before = identity(path)
    (part / "model.safetensors").write_bytes(b"other")
    assert identity(path) != before


def test_a_path_that_only_looks_like_a_commit_is_known_by_its_files(tmp_path: Path) -> None:
    mine = write_model(tmp_path / "snapshots" / COMMIT)
    assert identity(mine) == f"files {digest_of_files(mine)}"


def test_other_weights_are_another_model_however_alike_the_files_are(tmp_path: Path) -> None:
    first = write_model(tmp_path / "first", b"weights")
    others = [
        write_model(tmp_path / "one byte", b"weighty"),
        write_model(tmp_path / "rope", rope_theta=20000),
        write_model(tmp_path / "renamed"),
    ]
    (others[2] / "model.safetensors").rename(others[2] / "model-2.safetensors")
    assert len({identity(path) for path in [first, *others]}) == 4


def test_where_a_configuration_came_from_is_no_part_of_it(tmp_path: Path) -> None:
    first = write_model(tmp_path / "first", text_config={"_name_or_path": "a", "hidden_size": 1})
    moved = write_model(
        tmp_path / "moved",
        _name_or_path="/elsewhere",
        transformers_version="5.1",
        text_config={"_name_or_path": "b", "hidden_size": 1},
    )
    assert identity(first) == identity(moved)


def test_code_that_the_engine_runs_belongs_to_the_model(tmp_path: Path) -> None:
    first, other = write_model(tmp_path / "first"), write_model(tmp_path / "other")
    (other / "modeling.py").write_text("changed")
    assert identity(first) == identity(other)
    assert identity(first, trust_remote_code=True) != identity(other, trust_remote_code=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({}, "--revision"),
        ({"hf_config": known_commit(COMMIT), "hf_config_path": "org/other"}, "--revision"),
        ({"model_weights": "s3://bucket/model"}, "use a local copy"),
    ],
)
def test_weights_that_cannot_be_identified_are_refused(words: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        identity("org/model", **words)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    empty = write_model(tmp_path / "model")
    (empty / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weight files"):
        identity(empty)


def test_a_loader_that_may_find_weights_elsewhere_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="load_format tensorizer may read weights from another place"):
        weights_identity(model(path), SimpleNamespace(load_format="tensorizer"))


# ----------------------------------------------------------------------------------------- the choice among the files


def read_as(path: object, load_format: str = "auto", **words: Any) -> str:
    return weights_identity(model(path), SimpleNamespace(load_format=load_format, **words))


def test_the_index_that_chooses_the_weight_files_belongs_to_the_model_without_its_sizes(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    (path / "tuned.safetensors").write_bytes(b"tuned")
    index = path / "model.safetensors.index.json"

    def chosen(file: str, size: int = 1) -> str:
        index.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": {"w": file}}))
        return identity(path)

    assert chosen("model.safetensors") == chosen("model.safetensors", size=2)
    assert len({chosen("model.safetensors"), chosen("tuned.safetensors")}) == 2


@pytest.mark.parametrize(
    "name",
    ["consolidated.safetensors.index.json", "adapter_config.json", "quantization_config.json", "my_quant_config.json"],
)
def test_every_configuration_file_counts(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "model")
    found = {identity(path)}
    for content in ("[1]", "[2]"):
        (path / name).write_text(content)
        found.add(identity(path))
    assert len(found) == 3


def test_files_that_only_change_tokens_or_sampling_do_not_count(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    before = identity(path)
    for name in ("generation_config.json", "tokenizer.json", "README.md"):
        (path / name).write_text("{}")
    assert identity(path) == before


def test_load_formats_that_read_other_files_are_other_models(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    for name in ("pytorch_model.bin", "model.pt"):
        (path / name).write_bytes(b"other")
    formats = ["auto", "pt", "npcache", "mistral", "runai_streamer", "sharded_state"]
    assert len({read_as(path, each) for each in formats}) == len(formats)
    same = ["auto", "hf", "safetensors", "fastsafetensors", "instanttensor"]
    assert len({read_as(path, each) for each in same}) == 1


def test_auto_prefers_the_files_of_the_mistral_format(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    (path / "consolidated.safetensors").write_bytes(b"mistral")
    assert read_as(path, "auto") == read_as(path, "mistral") != read_as(path, "safetensors")
    assert read_as(path, "hf") == read_as(path, "safetensors")


def test_the_copies_that_npcache_reads_count_for_it_alone(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    (path / "pytorch_model.bin").write_bytes(b"weights")
    auto, cached = read_as(path), read_as(path, "npcache")
    (path / "np").mkdir()
    (path / "np" / "weight_names.json").write_text('["w"]')
    (path / "np" / "w").write_bytes(b"older weights")
    assert read_as(path) == auto
    assert read_as(path, "npcache") != cached


def test_settings_of_the_loader_that_choose_files_count_and_its_speed_does_not(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")

    def sharded(**extra: Any) -> str:
        return read_as(path, "sharded_state", model_loader_extra_config=extra)

    patterns = [{}, {"pattern": "a-{rank}-{part}.safetensors"}, {"pattern": "b-{rank}-{part}.safetensors"}]
    assert len({sharded(**each) for each in patterns}) == len(patterns)
    assert sharded(pattern=None) == sharded()
    assert read_as(path, model_loader_extra_config={"num_threads": 4}) == identity(path)
    assert read_as(path, ignore_patterns=["original/**/*"]) == identity(path)
    assert read_as(path, ignore_patterns=["*.safetensors"]) != identity(path)


@pytest.mark.parametrize("pattern", ["/other/{rank}-{part}.safetensors", "../{rank}.safetensors", "{rank}-{part}.st"])
def test_a_pattern_of_files_that_are_not_identified_is_refused(tmp_path: Path, pattern: str) -> None:
    path = write_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="pattern"):
        read_as(path, "sharded_state", model_loader_extra_config={"pattern": pattern})


@pytest.mark.parametrize("load_format", ["ipc_cache", "modelexpress"])
def test_weights_that_another_process_holds_are_refused(tmp_path: Path, load_format: str) -> None:
    with pytest.raises(ConfigError, match="another place"):
        read_as(write_model(tmp_path / "model"), load_format)


def test_a_copy_of_a_cache_is_what_it_holds_whatever_its_links_and_times_are(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "cache")
    shutil.copytree(tmp_path / "cache", tmp_path / "copy", symlinks=True)
    copied = tmp_path / "copy" / snapshot.relative_to(tmp_path / "cache")
    link = copied / "model.safetensors"
    link.unlink()
    blob = copied.parent.parent / "blobs" / (snapshot / "model.safetensors").resolve().name
    link.symlink_to(blob)
    assert identity(copied) == identity(snapshot)
    altered = bytearray(blob.read_bytes())
    altered[-1] ^= 1
    before = blob.stat()
    blob.write_bytes(altered)
    os.utime(blob, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert identity(copied) != identity(snapshot)


# ------------------------------------------------------------------------------------------------- what the engine read


def changes(path: Path, how: str) -> None:
    """Change the weights of a model, and keep their size and time of modification."""
    file = path / "model.safetensors"
    before, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    if how == "in place":
        file.write_bytes(content)
    elif how == "by rename":
        (path / "new").write_bytes(content)
        (path / "new").rename(file)
    elif how == "by a link":
        (path.parent / "elsewhere").write_bytes(content)
        file.unlink()
        file.symlink_to(path.parent / "elsewhere")
    else:
        (path / "more.safetensors").write_bytes(content)
        return
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("how", ["in place", "by rename", "by a link", "by another file"])
def test_files_that_changed_since_the_engine_started_are_unproven(tmp_path: Path, how: str) -> None:
    path = write_model(tmp_path / "model")
    before = files_seen(model(path), AUTO)
    assert unproven(before, files_seen(model(path), AUTO)) is None
    changes(path, how)
    assert unproven(before, files_seen(model(path), AUTO)) is not None


@pytest.mark.parametrize(
    "moved", ["link to the directory", "link to a file", "link in a chain", "directory", "above it"]
)
def test_what_leads_to_the_files_and_was_moved_away_and_back_is_unproven(tmp_path: Path, moved: str) -> None:
    """The engine may have read another model's files in between."""
    (tmp_path / "above").mkdir()
    path = write_model(tmp_path / "above" / "model")
    (path / "model.safetensors").rename(tmp_path / "blob")
    (path / "model.safetensors").symlink_to(tmp_path / "blob")
    (tmp_path / "inner").symlink_to("above/model")
    (tmp_path / "outer").symlink_to(tmp_path / "inner")
    asked = model(tmp_path / "outer")
    before = files_seen(asked, AUTO)
    (path / "new").touch()
    assert unproven(before, files_seen(asked, AUTO)) is None
    place = {
        "link to the directory": tmp_path / "outer",
        "link to a file": path / "model.safetensors",
        "link in a chain": tmp_path / "inner",
        "directory": path,
        "above it": path.parent,
    }[moved]
    before = files_seen(asked, AUTO)
    place.rename(tmp_path / "away")
    (tmp_path / "away").rename(place)
    assert str(place) in str(unproven(before, files_seen(asked, AUTO)))


def test_a_file_that_a_process_may_write_through_a_mapping_is_unproven(tmp_path: Path) -> None:
    """Stores through a mapping whose pages are dirty already leave all times as they are."""
    path = write_model(tmp_path / "model")
    weights = path / "model.safetensors"
    before = files_seen(model(path), AUTO)
    with weights.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[0] = mapping[0]
        held = files_seen(model(path), AUTO)
        assert unproven(held, files_seen(model(path), AUTO)) == str(weights.resolve())
        assert unproven(before, held) == str(weights.resolve())


def test_a_file_that_a_process_only_reads_is_no_writer(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    weights = path / "model.safetensors"
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert not has_writer(weights)
    assert not has_writer(path / "absent")


def test_a_file_that_is_gone_is_unproven(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    before = files_seen(model(path), AUTO)
    (path / "config.json").unlink()
    assert unproven(before, files_seen(model(path), AUTO)) == str(path.resolve() / "config.json")


@pytest.mark.parametrize("intact", [True, False])
def test_a_model_that_the_engine_downloads_is_proven_by_the_names_of_its_blobs(tmp_path: Path, intact: bool) -> None:
    snapshot = write_snapshot(tmp_path / "cache")
    if not intact:
        (snapshot / "model.safetensors").write_bytes(b"mine")
    assert (unproven({}, files_seen(model(snapshot), AUTO)) is None) == intact


@pytest.mark.parametrize(("content", "right"), [(b"small", True), (b"other", False)])
def test_a_small_file_s_blob_has_git_s_name(tmp_path: Path, content: bytes, right: bool) -> None:
    snapshot, blobs = tmp_path / "snapshots" / COMMIT, tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    blob = blobs / hashlib.sha1(b"blob 5\0small").hexdigest()
    blob.write_bytes(content)
    (snapshot / "config.json").symlink_to(blob)
    assert is_as_downloaded(snapshot / "config.json") is right


IDENTITY = ModelIdentity(name="org/model", weights="not known", dtype="float32", layout="test")


def configuration(path: Path) -> Any:
    return SimpleNamespace(
        model_config=model(path), load_config=AUTO, speculative_config=None, kv_transfer_config=SimpleNamespace()
    )


def looks_up(vllm_config: Any) -> None:
    """Note the files as vLLM's look-up of the connector's class does."""
    note_files(sys._getframe())


def identification_of(vllm_config: Any) -> Identification:
    """Return an identification for workers that compute with what the scheduler's side knows."""
    return Identification(IDENTITY, vllm_config, [settings_mark(IDENTITY)])


def found(identification: Identification) -> ModelIdentity:
    """Return the identity, whose determination takes much less than a minute."""
    try:
        for _ in range(60):
            with contextlib.suppress(TemporaryStoreError):
                return identification()
        pytest.fail("the model is not identified")
    finally:
        identification.stop()


def test_the_weights_are_identified_beside_the_start_of_the_engine(tmp_path: Path) -> None:
    config = configuration(write_model(tmp_path / "model"))
    looks_up(config)
    identification = identification_of(config)
    identification.start()
    assert found(identification).weights == weights_identity(config.model_config, AUTO)


@pytest.mark.parametrize("how", ["in place", "by rename", "by a link", "by another file"])
def test_weights_that_changed_while_the_engine_read_them_have_no_identity(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_model(tmp_path / "model")
    config = configuration(path)
    looks_up(config)
    changes(path, how)
    looks_up(config)  # later look-ups come after the engine has read the files
    identification = identification_of(config)
    identification.start()
    with pytest.raises(PermanentStoreError, match="changed while the engine started"):
        found(identification)
    assert caplog.text.count("no tier that outlives the process is used") == 1


def test_without_a_look_up_files_older_than_the_process_are_proven(tmp_path: Path) -> None:
    program = (
        "import sys; from types import SimpleNamespace as S; from tests.engines.test_identity import *;"
        "one = identification_of(configuration(Path(sys.argv[1]))); one.start();"
        "print('proven' if found(one).weights else '')"
    )
    path = write_model(tmp_path / "model")
    os.utime(path / "model.safetensors")
    young = identification_of(configuration(path))
    young.start()
    with pytest.raises(PermanentStoreError):
        found(young)
    assert until(lambda: time.time() - (path / "model.safetensors").stat().st_ctime > 3.5)
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "proven\n", done.stderr


@pytest.mark.parametrize("thread", ["kv-tiering-identity", "kv-tiering-digest"])
def test_without_threads_a_model_has_no_identity(tmp_path: Path, thread: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(write_model(tmp_path / "model"))
    looks_up(config)
    ThreadLimit(monkeypatch).reach(thread)
    identification = identification_of(config)
    identification.start()
    with pytest.raises(PermanentStoreError, match="thread"):
        found(identification)


def test_a_model_that_cannot_be_identified_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be identified"):
        identification_of(configuration(tmp_path / "org" / "model")).start()


def test_workers_that_compute_with_the_schedulers_configuration_leave_the_namespace_as_it_was(tmp_path: Path) -> None:
    config = configuration(write_model(tmp_path / "model"))
    looks_up(config)
    identification = identification_of(config)
    identification.start()
    assert found(identification).overrides == IDENTITY.overrides


def test_another_configuration_of_all_workers_is_part_of_the_namespace(tmp_path: Path) -> None:
    config = configuration(write_model(tmp_path / "model"))
    looks_up(config)
    overrides = []
    for change in ("one", "another"):
        identification = Identification(IDENTITY, config, [settings_mark(IDENTITY, [change])])
        identification.start()
        overrides.append(found(identification).overrides)
    assert overrides[0] != overrides[1]
    assert IDENTITY.overrides not in overrides


@pytest.mark.parametrize(
    ("marks", "reason"),
    [
        ([b"one", b"another"], "built from different configurations"),
        ([UNKNOWN], "is not known"),
        ([settings_mark(IDENTITY), UNKNOWN], "built from different configurations"),
        ([], "is not known"),
    ],
)
def test_workers_whose_configuration_differs_or_is_not_known_use_no_tier_that_outlives_the_process(
    tmp_path: Path, marks: list[bytes], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    identification = Identification(IDENTITY, configuration(write_model(tmp_path / "model")), marks)
    identification.start()
    with pytest.raises(PermanentStoreError, match=reason):
        found(identification)
    assert caplog.text.count("no tier that outlives the process is used") == 1


# ----------------------------------------------------------------------------------------------------- draft, overrides


def test_a_draft_is_known_by_its_weights_too_and_by_its_name_if_need_be(tmp_path: Path) -> None:
    target = model(write_model(tmp_path / "target"))
    draft = write_model(tmp_path / "draft", b"draft")
    (tmp_path / "link").symlink_to(draft)

    def known(config: Any) -> str | None:
        speculative = SimpleNamespace(model="typed", revision=None, draft_model_config=config)
        return draft_identity(SimpleNamespace(model_config=target, speculative_config=speculative, load_config=AUTO))

    assert known(model(draft)) == known(model(tmp_path / "link")) == identity(draft)
    assert known(target) == "part of the model"
    assert known(model("org/draft")) == known(None) == "typed, revision None"
    assert draft_identity(SimpleNamespace(model_config=target, speculative_config=None)) is None


def said(path: str, dictionary: dict[str, Any], **words: Any) -> dict[str, Any]:
    config = SimpleNamespace(to_dict=lambda: dictionary, architectures=["A"])
    return overrides(SimpleNamespace(model_config=model(path, hf_config=config), **words), "0.33")


def test_a_configuration_says_the_same_by_name_and_by_path() -> None:
    by_name = {**CONFIG, "auto_map": {"AutoModel": "org/model--modeling.Model"}, "text_config": {"_name_or_path": "x"}}
    by_path = {
        **CONFIG,
        "auto_map": {"AutoModel": "modeling.Model"},
        "_name_or_path": "/a",
        "text_config": {"_name_or_path": "y"},
    }
    assert said("org/model", by_name) == said("/a", by_path)


def test_what_changes_results_is_in_the_overrides() -> None:
    changed: list[dict[str, Any]] = [
        {},
        {"rope_theta": 20000},
        {"auto_map": {"AutoModel": "other/model--modeling.Model"}},
        {"text_config": {"hidden_size": 1}},
    ]
    digests = {json.dumps(said("org/model", {**CONFIG, **change})) for change in changed}
    assert len(digests) == len(changed)
    assert said("org/model", CONFIG, num_hash_lookahead_tokens=1) != said(
        "org/model", CONFIG, num_hash_lookahead_tokens=0
    )


@dataclass
class Attention:
    """vLLM's configuration of attention, with some of its words."""

    backend: str | None = None
    flash_attn_version: int | None = None
    indexer_kv_dtype: str = "auto"
    use_non_causal: bool = False
    use_prefill_query_quantization: bool = False


@dataclass
class Kernels:
    """vLLM's choice of kernels, with some of its words."""

    enable_jit_warmup: bool = True
    linear_backend: str = "auto"
    linear_backend_per_quant: dict[str, str] | None = None
    moe_backend: str = "auto"


def with_value(config: str | None, **words: Any) -> dict[str, Any]:
    """Return the overrides with settings in a part of vLLM's configuration; None: in vLLM's own."""
    hf_config = SimpleNamespace(to_dict=lambda: CONFIG, architectures=["A"])
    known = SimpleNamespace(model_config=model("/a", hf_config=hf_config), cache_config=SimpleNamespace())
    known.attention_config, known.kernel_config = Attention(), Kernels()
    vars(known if config is None else getattr(known, config)).update(words)
    return overrides(known, "0.33")


@pytest.mark.parametrize(
    ("config", "word", "default", "other"),
    [
        ("model_config", "model_class_overrides", {}, {"A": "other:Model"}),
        ("attention_config", "use_non_causal", False, True),
        ("attention_config", "use_prefill_query_quantization", False, True),
        ("attention_config", "indexer_kv_dtype", "auto", "mxfp4"),
        ("attention_config", "of a later vLLM", None, 1),
        ("kernel_config", "linear_backend", "auto", "marlin"),
        ("kernel_config", "linear_backend_per_quant", None, {"nvfp4_w4a16": "humming"}),
        ("kernel_config", "moe_backend", "auto", "marlin"),
        ("cache_config", "kv_cache_dtype_skip_layers", [], ["1"]),
        (None, "additional_config", {}, {"of a plugin": 1}),
        (None, "additional_config", {}, SimpleNamespace(compute_hash=lambda: "of a plugin")),
    ],
)
def test_rare_settings_that_change_kv_count_unless_they_have_their_defaults(
    config: str | None, word: str, default: Any, other: Any
) -> None:
    assert with_value(config, **{word: other}) != with_value(config, **{word: default}) == with_value(None)
    assert "0x" not in str(with_value(config, **{word: other})), "an address would differ in each process"


@pytest.mark.parametrize(
    ("config", "word", "other"),
    [
        ("attention_config", "backend", "of the order in memory"),
        ("attention_config", "flash_attn_version", 3),
        ("kernel_config", "enable_jit_warmup", False),
    ],
)
def test_kernels_that_differ_by_roundings_share_kv(config: str, word: str, other: Any) -> None:
    assert with_value(config, **{word: other}) == with_value(None)


def test_kernels_that_do_not_depend_on_the_batch_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = said("org/model", CONFIG)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert said("org/model", CONFIG) == before
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert said("org/model", CONFIG) != before


def test_packages_of_kernels_count_where_weights_are_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel quantises activations, another does not, and vLLM chooses among those that are installed."""

    def both() -> tuple[Any, Any]:
        hf_config = SimpleNamespace(to_dict=lambda: CONFIG, architectures=["A"])
        models = [model("org/model", hf_config=hf_config, quantization=method) for method in (None, "fp8")]
        first, second = (overrides(SimpleNamespace(model_config=each), "0.33") for each in models)
        return first, second

    def install(version: str) -> None:
        (tmp_path / "deep_gemm").mkdir(exist_ok=True)
        (tmp_path / "deep_gemm" / "__init__.py").write_text("raise ImportError('it is not imported')")
        info = tmp_path / "deep_gemm-1.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deep-gemm\nVersion: {version}\n")
        importlib.invalidate_caches()

    monkeypatch.setattr("tiering.engines.vllm.identity._KERNELS", {"deep_gemm": "deep-gemm", "not_there": "not-there"})
    plain, without = both()
    assert "kernel_packages" not in str(without)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for version in ("2.1.0", "2.1.1+local", "2.2"):
        install(version)
        same, quantised = both()
        assert same == plain
        found.append(quantised)
    assert found[0] == found[1] != found[2]
    assert without not in found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_CPU_INT4_W4A8", "0"),
        ("VLLM_MARLIN_INPUT_DTYPE", "int8"),
        ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", '{"b_dtype": "int4"}'),
        ("VLLM_FLOAT32_MATMUL_PRECISION", "medium"),
        ("VLLM_DISABLED_KERNELS", "CutlassFP8ScaledMMLinearKernel"),
    ],
)
def test_variables_that_quantise_or_lower_the_precision_count(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    before = said("org/model", CONFIG)
    monkeypatch.setenv(name, value)
    assert said("org/model", CONFIG) != before


def test_random_weights_depend_on_the_number_of_ranks_and_others_do_not() -> None:
    def loaded(load_format: str, ranks: int) -> dict[str, Any]:
        hf_config = SimpleNamespace(to_dict=lambda: CONFIG, architectures=["A"])
        known = SimpleNamespace(model_config=model("/a", hf_config=hf_config))
        known.load_config = SimpleNamespace(load_format=load_format)
        known.parallel_config = SimpleNamespace(tensor_parallel_size=ranks)
        return overrides(known, "0.33")

    assert loaded("dummy", 2) != loaded("dummy", 1) == loaded("auto", 1) == loaded("auto", 2)


def test_a_file_that_a_variable_names_counts_by_its_content(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def with_file(name: str, content: str) -> dict[str, Any]:
        (tmp_path / name).write_text(content)
        monkeypatch.setenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG", str(tmp_path / name))
        return said("org/model", CONFIG)

    assert with_file("a", "{}") == with_file("b", "{}") != with_file("a", '{"b_dtype": "int4"}')


def test_a_quantisation_file_outside_the_model_counts_by_its_content(tmp_path: Path) -> None:
    file = tmp_path / "quantization.json"

    def with_file(content: str) -> dict[str, Any]:
        file.write_text(content)
        config = SimpleNamespace(to_dict=lambda: CONFIG, architectures=["A"])
        named = {"quantization_config_file": str(file)}
        return overrides(SimpleNamespace(model_config=model("/a", hf_config=config, hf_overrides=named)), "0.33")

    assert with_file("{}") == with_file("{}") != with_file('{"bits": 4}')
    file.unlink()
    config = SimpleNamespace(to_dict=lambda: CONFIG, architectures=["A"])
    with pytest.raises(ConfigError, match="quantization_config_file"):
        overrides(
            SimpleNamespace(
                model_config=model("/a", hf_config=config, hf_overrides={"quantization_config_file": str(file)})
            ),
            "0.33",
        )


def seeing(**words: Any) -> dict[str, Any]:
    """Return the overrides of a model with these multimodal settings, vLLM's defaults for all others."""
    defaults: dict[str, Any] = {
        "mm_processor_kwargs": None,
        "media_io_kwargs": {},
        "video_pruning_rate": None,
        "video_pruning_method": "evs",
        "mm_encoder_attn_dtype": None,
        "mm_encoder_fp8_scale_path": None,
        "limit_per_prompt": {},
    }
    settings = model("/a", multimodal_config=SimpleNamespace(**{**defaults, **words}))
    return overrides(SimpleNamespace(model_config=settings), "0.33")


def test_what_changes_the_features_of_images_is_in_the_overrides(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    changed: list[dict[str, Any]] = [
        {},
        {"mm_processor_kwargs": {"do_normalize": False}},
        {"mm_processor_kwargs": {"size": {"longest_edge": 448}}},
        {"media_io_kwargs": {"video": {"num_frames": 8}}},
        {"video_pruning_rate": 0.5},
        {"video_pruning_rate": 0.5, "video_pruning_method": "other"},
        {"mm_encoder_attn_dtype": "fp8"},
        {"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": str(scales)},
    ]
    assert len({json.dumps(seeing(**change)) for change in changed}) == len(changed)
    before = seeing(mm_encoder_fp8_scale_path=str(scales))
    scales.write_text('{"layer": 2}')
    assert seeing(mm_encoder_fp8_scale_path=str(scales)) != before


def test_defaults_for_images_leave_the_namespace_as_it_was() -> None:
    text_only = overrides(SimpleNamespace(model_config=model("/a")), "0.33")
    assert seeing() == text_only
    assert seeing(mm_processor_kwargs={}, video_pruning_rate=0.0, limit_per_prompt={"image": 3}) == text_only


def test_a_file_of_scales_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mm_encoder_fp8_scale_path"):
        seeing(mm_encoder_fp8_scale_path=str(tmp_path / "missing.json"))


def test_the_files_of_an_engine_without_a_connector_are_left_alone(tmp_path: Path) -> None:
    config = configuration(tmp_path / "not looked at")
    config.kv_transfer_config = None
    before = dict(vars(config.model_config))
    looks_up(config)
    assert vars(config.model_config) == before


def test_objects_of_callers_that_call_themselves_for_a_missing_attribute_are_passed_over() -> None:
    """A worker's wrapper of vLLM does so before its worker is built, and plugins are loaded then."""

    class Wrapper:
        def __getattr__(self, name: str) -> object:
            return getattr(self.worker, name)

    class Slotted:
        __slots__ = ()

        def __getattr__(self, name: str) -> object:
            return getattr(self.worker, name)

    def load_plugins(wrapper: Wrapper, other: Slotted) -> None:
        note_files(sys._getframe())

    load_plugins(Wrapper(), Slotted())
