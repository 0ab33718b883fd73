"""The identity of a model's weights: the content of its files.

A directory of the Hugging Face cache is no exception: neither its links nor any times prove what a copy of it holds.
The path or name under which a model was loaded is not part of the identity. Nothing here imports vLLM; its objects are
read by attribute.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from tiering.engines.vllm.hub_cache import is_as_downloaded, snapshot_of
from tiering.errors import ConfigError
from tiering.runtime.json_text import parse_json

logger = logging.getLogger("kv_tiering.vllm")

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")
_OTHER_JSON = frozenset(
    {
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
        *("generation_config.json", "chat_template.json"),
    }
)
"""JSON files that change tokens or sampling only, which block hashes cover or KV does not depend on.

All other JSON files count: they choose the files that are read (``*.index.json``), or say how to use them.
"""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""An object's address, which differs between processes."""
_CHUNK = 16 << 20
_SLOW_SECONDS = 5.0
_PROGRESS_SECONDS = 10.0
"""Shortest time between two lines in the log about the progress."""
_TICK_SECONDS = 0.02
"""Longest tick of the clock that dates changes of files, in seconds."""
_OWN_FILES = (
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "npcache"),
    *("runai_streamer", "runai_streamer_sharded", "sharded_state", "bitsandbytes", "gguf"),
)
"""The load formats that read the files of the named model, and no other weights."""
_SAFETENSORS = ("safetensors", "fastsafetensors", "instanttensor")
"""The load formats that read ``*.safetensors``, as far as ``model.safetensors.index.json`` names them."""
_SPEED = frozenset(
    {
        *("enable_multithread_load", "num_threads", "enable_weights_track"),
        *("distributed", "concurrency", "memory_limit"),
    }
)
"""Words of ``model_loader_extra_config`` that affect how fast weights are read, and not which ones."""
_DIRECTORY = "the directory "
"""Beginning of a directory's name among the records of the file system."""
_IGNORED = ["original/**/*"]
"""vLLM's default of ``ignore_patterns``."""
_NOT_CONTENT = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"})
"""Words of a model's configuration that record its origin and do not affect its results."""

Seen = Mapping[str, tuple[int, ...]]
"""Records of the file system about a model's files, by path."""


def weights_identity(model_config: Any, load_config: Any) -> str:
    """Return a digest of the names and whole contents of the model's files.

    The result does not depend on the spelling of the model's path. The name of a repository stands for its directory in
    the Hugging Face cache, if there is one, else for its commit. All weight files are read; so does the worker.

    The settings that choose among the files are appended: the load format, ``model_loader_extra_config`` and
    ``ignore_patterns``. The load format is left out if it is ``auto``, or reads the same files of a local directory as
    ``auto``.

    Args:
        model_config: vLLM's model configuration.
        load_config: vLLM's load configuration.

    Raises:
        ConfigError: the model cannot be identified.
    """
    load_format = str(load_config.load_format)
    if load_format == "dummy":
        return f"dummy weights, seed {model_config.seed}"
    if load_format not in _OWN_FILES:
        raise ConfigError(
            f"load_format {load_format} may read weights from another place than {model_config.model}; "
            "their content cannot be identified, and may change: "
            "use a load format that reads the model's own files (auto)"
        )
    chosen = _choice_of_files(load_config)
    identity, directory = _identity(model_config, load_config)
    if _files_read(load_format, directory) != _files_read("auto", directory):
        chosen["load_format"] = _files_read(load_format, directory)
    return f"{identity}, {json.dumps(chosen, sort_keys=True)}" if chosen else identity


def _choice_of_files(load_config: Any) -> dict[str, Any]:
    """Return the settings other than the load format that choose which weights are read.

    Raises:
        ConfigError: a pattern may name files that the identity does not cover.
    """
    chosen: dict[str, Any] = {}
    given = plain(getattr(load_config, "model_loader_extra_config", None) or {})
    words = given if isinstance(given, dict) else {"value": given}
    extra = {word: value for word, value in words.items() if word not in _SPEED and value is not None}
    pattern = extra.get("pattern")
    if pattern is not None and (Path(str(pattern)).name != pattern or Path(str(pattern)).suffix not in _WEIGHTS):
        raise ConfigError(
            f"model_loader_extra_config.pattern {pattern} may name files that the model's identity does not cover: "
            f"use a file name without a directory that ends in one of {', '.join(_WEIGHTS)}"
        )
    if extra:
        chosen["model_loader_extra_config"] = extra
    ignored = getattr(load_config, "ignore_patterns", _IGNORED)
    if ignored != _IGNORED:
        chosen["ignore_patterns"] = plain(ignored)
    return chosen


def _files_read(load_format: str, directory: Path | None) -> str:
    """Return a name of the files that a load format reads, by the rules of vLLM's default loader.

    Args:
        load_format: vLLM's load format.
        directory: the model's directory if its files identify it; None if the files are not known.
    """
    if load_format in _SAFETENSORS:
        return "safetensors"
    if directory is None:
        return load_format
    if load_format == "auto":
        load_format = "mistral" if any(directory.rglob("consolidated*.safetensors")) else "hf"
    return "safetensors" if load_format == "hf" and any(directory.glob("*.safetensors")) else load_format


def draft_identity(vllm_config: Any) -> str | None:
    """Return the identity of the draft model of speculative decoding, or None without one.

    If a draft model cannot be identified, its name stands for it. That is safe: the model itself rejects wrong drafts,
    so they only cost time.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return None
    draft = getattr(speculative, "draft_model_config", None)
    named = f"{getattr(speculative, 'model', None)}, revision {getattr(speculative, 'revision', None)}"
    if draft is None:
        return named
    target = vllm_config.model_config
    if (draft.model, getattr(draft, "revision", None)) == (target.model, getattr(target, "revision", None)):
        return "part of the model"
    try:
        return weights_identity(draft, getattr(speculative, "draft_load_config", None) or vllm_config.load_config)
    except ConfigError as error:
        logger.info("the draft model is identified by its name only: %s", error)
        return named


def files_seen(model_config: Any, load_config: Any) -> Seen:
    """Return what the file system records of the files that identify a model, without reading them.

    Equal results before the engine reads the files, and after they were identified, mean that the engine has read what
    was identified. The method waits until the clock's tick in which a file was last written is over.

    Args:
        model_config: vLLM's model configuration.
        load_config: vLLM's load configuration.

    Returns:
        Path of a file → device, inode, size, times of modification and change, and 1 if a process may write to the
        file through a descriptor or a mapping that it has, else 0; empty if there are no files. The links and
        directories on the way to files have names that are no paths.

    Raises:
        ConfigError: the model cannot be identified.
        OSError: a file cannot be looked at.
    """
    if str(load_config.load_format) == "dummy":
        return {}
    given, _ = _given(model_config, load_config)
    if given is None:
        return {}
    place = _resolved(given)
    found = _statuses(given, place, _files(place, *_scope(model_config, load_config)))
    newest = max((status.st_ctime for status in found.values()), default=0.0)
    if abs(time.time() - newest) < _TICK_SECONDS:
        time.sleep(_TICK_SECONDS)
    return _seen(found)


def records_of(given: Path, files: Sequence[Path]) -> Seen:
    """Return what the file system records of files, as :func:`files_seen` does, without a wait.

    Args:
        given: the directory of the files.
        files: the files, first in the result.

    Raises:
        OSError: a file cannot be looked at.
    """
    return _seen(_statuses(given, given.resolve(), files))


def _statuses(given: Path, place: Path, files: Sequence[Path]) -> dict[str, os.stat_result]:
    """Return the states of files, and of the links and directories on the way to them."""
    found = {str(file): file.stat() for file in files}
    links = {link for file in (given, *files) for link in _links_to(file)}
    above = (place, *place.parents, *given.absolute().parents)
    return (
        found
        | {f"the link {link}": link.lstat() for link in links}
        | {f"{_DIRECTORY}{one}": one.stat() for one in above if one.is_dir()}
    )


def _seen(found: Mapping[str, os.stat_result]) -> Seen:
    return {name: (*record_of(status), int(has_writer(Path(name)))) for name, status in found.items()}


def _links_to(path: Path) -> Iterator[Path]:
    """Yield all symbolic links on the way to a path: one that was replaced and put back is noticed."""
    at, rest, found = Path("/"), [*reversed(path.absolute().parts)], set[Path]()
    while rest:
        at /= rest.pop()
        if at.is_symlink() and at not in found:
            found.add(at)
            yield at
            rest += reversed(at.readlink().parts)
            at = at.parent


def record_of(status: os.stat_result) -> tuple[int, int, int, int, int]:
    """Return device, inode, size, and times of modification and change of a file."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def has_writer(file: Path) -> bool:
    """Return True if a process has the file open, or mapped, for writing.

    Stores through a mapping may leave all times of the file as they are. The kernel grants no read lease on such a
    file. False is no proof: only the file's owner may ask, and some file systems have no leases.
    """
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Whoever opens the file while the lease stands causes a signal; this one is ignored by default.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def unproven(before: Seen, after: Seen) -> str | None:
    """Return a file that the engine may have read with other content; None: there is none.

    A file that was missing before was downloaded by the engine. It counts if it is a blob of the Hugging Face cache
    that still has the content of its name.

    Args:
        before: what :func:`files_seen` returned before the engine read the files.
        after: what it returned once the files were identified.
    """
    new = [name for name in after if name not in before and name.startswith("/")]
    return changed_of(before, after) or next((name for name in new if not is_as_downloaded(Path(name))), None)


def changed_of(before: Seen, after: Seen) -> str | None:
    """Return a file, link or directory that is another one now, or may be written; None: there is none."""
    changed = [name for name, seen in before.items() if _has_changed(name, seen, after.get(name))]
    changed += [name for seen in (before, after) for name, record in seen.items() if record[-1]]
    return next(iter(changed), None)


def _has_changed(name: str, before: tuple[int, ...], after: tuple[int, ...] | None) -> bool:
    """Return True if a file, link or directory is no longer what it was.

    Entries that come and go change both times of a directory; a directory that was moved away and back has another time
    of change alone.
    """
    if after is None or not name.startswith(_DIRECTORY):
        return before != after
    return before[:2] != after[:2] or (before[3] == after[3] and before[4] != after[4])


def _given(model_config: Any, load_config: Any) -> tuple[Path | None, str]:
    """Return the path of the weights, or None and the commit that is read from elsewhere."""
    model, revision = str(model_config.model), getattr(model_config, "revision", None)
    elsewhere = str(getattr(model_config, "model_weights", "") or model)
    if elsewhere != model and not Path(elsewhere).exists():
        raise ConfigError(
            f"the weights are read from {elsewhere}; their content cannot be identified, and may change: "
            "use a local copy of the model"
        )
    path = Path(elsewhere)
    if not path.exists():
        commit = revision if isinstance(revision, str) and _COMMIT.fullmatch(revision) else _commit_of(model_config)
        snapshot = snapshot_of(model, commit, getattr(load_config, "download_dir", None))
        if snapshot is None:
            return None, commit
        path = snapshot
    return path, ""


def _resolved(path: Path) -> Path:
    """Return a path without links in its directories.

    Its file may be a link into the cache's blobs, which have other names.
    """
    return path.parent.resolve() / path.name if path.is_file() else path.resolve()


def _scope(model_config: Any, load_config: Any) -> tuple[bool, bool]:
    """Return if Python files count, and if the copies of load format npcache do."""
    return bool(getattr(model_config, "trust_remote_code", False)), str(load_config.load_format) == "npcache"


def _identity(model_config: Any, load_config: Any) -> tuple[str, Path | None]:
    """Return the identity of the model's files, and its directory if its files identify it."""
    given, commit = _given(model_config, load_config)
    if given is None:
        return f"commit {commit}", None
    place = _resolved(given)
    code, copies = _scope(model_config, load_config)
    digest = digest_of_files(place, code=code, copies=copies)
    return f"files {digest}", place if place.is_dir() else None


def _commit_of(model_config: Any) -> str:
    """Return the commit of the configuration that vLLM has read for the name of a repository.

    Raises:
        ConfigError: it is not known.
    """
    model = str(model_config.model)
    own_config = getattr(model_config, "hf_config_path", None) in (None, "", model)
    commit = getattr(model_config.hf_config, "_commit_hash", None) if own_config else None
    if not isinstance(commit, str) or not commit:
        raise ConfigError(
            f"the weights of {model} cannot be identified (neither a local path nor a known commit), "
            "and weights change under a name: set --revision to a commit hash, or use a local copy of the model"
        )
    return commit


def digest_of_files(path: Path, *, code: bool = False, copies: bool = False) -> str:
    """Return the digest of a model's configuration and weight files: 32 hex digits.

    The digest covers names, sizes and contents. Words of a JSON file that only record its origin do not count.

    Args:
        path: directory of the model, or its single file.
        code: True to include Python files, because the engine runs them; default False.
        copies: True to include the directory ``np``, whose copies of the weights load format npcache reads; default
            False.

    Raises:
        ConfigError: there are no weight files.
    """
    started = told = time.monotonic()
    files = _files(path, code, copies)
    if not path.is_file() and not any(file.suffix in _WEIGHTS for file in files):
        raise ConfigError(f"{path} holds no weight files ({', '.join(_WEIGHTS)}): the model cannot be identified")
    with ThreadPoolExecutor(4, thread_name_prefix="kv-tiering-digest") as pool:
        digests = []
        for number, digest in enumerate(pool.map(digest_of, files), 1):
            digests.append(digest)
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                logger.info("identifying the weights: %d of %d files read", number, len(files))
    root = path.parent if path.is_file() else path
    total = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        total.update(f"{file.relative_to(root).as_posix()}\0{digest}\n".encode())
    seconds = time.monotonic() - started
    if seconds > _SLOW_SECONDS:
        logger.info("identifying the weights took %.0f s, because all files were read", seconds)
    return total.hexdigest()[:32]


def _files(path: Path, code: bool, copies: bool) -> list[Path]:
    """Return the files that belong to a model, sorted."""
    if path.is_file():
        return [path]
    suffixes = (*_WEIGHTS, ".py") if code else _WEIGHTS
    return sorted(
        file
        for file in _walk(path)
        if file.is_file()
        and (
            file.suffix in suffixes
            or (copies if path / "np" in file.parents else file.suffix == ".json" and file.name not in _OTHER_JSON)
        )
    )


def _walk(directory: Path) -> Iterator[Path]:
    """Yield all files below a directory, also below links; a link to a directory above ends there."""
    for place, names, files in os.walk(directory, followlinks=True):
        above = {Path(place).resolve(), *Path(place).resolve().parents}
        names[:] = [name for name in names if (Path(place) / name).resolve() not in above]
        yield from (Path(place) / name for name in files)


def digest_of(file: Path) -> str:
    """Return the digest of a file's content; for JSON of its meaning, without names and paths.

    Raises:
        OSError: the file cannot be read.
    """
    if file.suffix == ".json":
        try:
            value = meaning(parse_json(file.read_bytes()))
            if file.name.endswith(".index.json") and isinstance(value, dict):
                value = value.get("weight_map", value)  # the other words describe sizes
            content = json.dumps(value, sort_keys=True)
        except ValueError:
            logger.info("%s is not JSON; its bytes identify it", file)
        else:
            return hashlib.sha256(content.encode()).hexdigest()
    digest, size = xxhash.xxh3_128(), 0
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return f"{size} {digest.hexdigest()}"


def meaning(value: Any) -> Any:
    """Return a configuration without the words that do not affect the model's results."""
    if isinstance(value, Mapping):
        return {word: meaning(item) for word, item in value.items() if word not in _NOT_CONTENT}
    return [meaning(item) for item in value] if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """Return ``value`` as plain data that JSON can hold."""
    if isinstance(value, Mapping):
        return {str(word): plain(item) for word, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(item) for item in value)  # the order differs between processes
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    return _ADDRESS.sub("", str(value))
