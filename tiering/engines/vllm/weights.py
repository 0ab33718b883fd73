"""The identity of a model's weights: the commit of its repository, or the content of its files.

The path or name by which a model was loaded is no part of it.

Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from tiering.errors import ConfigError

logger = logging.getLogger("kv_tiering.vllm")

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")
_CONFIGS = ("config.json", "params.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"/models--[^/]+/snapshots/([0-9a-f]{40})(?:/(.+))?$")
"""A place in the Hugging Face cache: the commit, and what follows it."""
_CHUNK = 16 << 20
_SLOW_SECONDS = 5.0
_OWN_FILES = (
    *(
        "auto",
        "hf",
        "safetensors",
        "pt",
        "npcache",
        "mistral",
        "fastsafetensors",
        "instanttensor",
        "ipc_cache",
        "modelexpress",
    ),
    *("runai_streamer", "runai_streamer_sharded", "sharded_state", "bitsandbytes", "gguf"),
)
"""The load formats that read the weights of the model that is named, and no others."""
_NOT_CONTENT = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"})
"""Words of a model's configuration that say where it came from, and nothing about what it computes."""


def weights_identity(model_config: Any, load_config: Any) -> str:
    """A commit of the model's repository, or a digest of its files' names and whole contents.

    The result is the same however the model's path is spelled; a directory of the Hugging Face cache and the
    repository's name give the same commit.  All weight files of a local model without a commit are read (the worker
    has just read them too). ``model_config`` and ``load_config`` are vLLM's.  Raises :class:`ConfigError` if the
    model cannot be identified.
    """
    load_format = str(load_config.load_format)
    if load_format == "dummy":
        return f"dummy weights, seed {model_config.seed}"
    if load_format not in _OWN_FILES:
        raise ConfigError(
            f"load_format {load_format}: may read weights from elsewhere than {model_config.model}, whose content cannot be "
            "identified, and may change: use a load format that reads the model's own files (auto)"
        )
    return _identity(model_config)


def draft_identity(vllm_config: Any) -> str | None:
    """The identity of the draft model of speculative decoding; None without one.

    A draft that cannot be identified is known by its name: the model itself refuses a draft's wrong guesses, which
    cost time only.
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
        logger.info("the draft model is known by its name only: %s", error)
        return named


def _identity(model_config: Any) -> str:
    model, revision = str(model_config.model), getattr(model_config, "revision", None)
    elsewhere = str(getattr(model_config, "model_weights", "") or model)
    if elsewhere != model and not Path(elsewhere).exists():
        raise ConfigError(
            f"the weights are read from {elsewhere}, whose content cannot be identified, and may change: use a local copy of the model"
        )
    path = Path(elsewhere)
    if path.exists():
        # The file itself may be a link into the cache's blobs, where its name is lost; the directory may be a link to
        # anywhere.
        place = path.parent.resolve() / path.name if path.is_file() else path.resolve()
        if snapshot := _SNAPSHOT.search(place.as_posix()):
            commit, part = snapshot.groups()
            return f"commit {commit}" if part is None else f"commit {commit}, {part}"
        return f"files {digest_of_files(place, code=bool(getattr(model_config, 'trust_remote_code', False)))}"
    if isinstance(revision, str) and _COMMIT.fullmatch(revision):
        return f"commit {revision}"
    own_config = getattr(model_config, "hf_config_path", None) in (None, "", model)
    commit = getattr(model_config.hf_config, "_commit_hash", None) if own_config else None
    if not isinstance(commit, str) or not commit:
        raise ConfigError(
            f"the weights of {model} cannot be identified (neither a local path nor a known commit), and weights change under a name: "
            "set --revision to a commit hash, or use a local copy of the model"
        )
    return f"commit {commit}"


def digest_of_files(path: Path, *, code: bool = False) -> str:
    """Digest (32 hex digits) of the configuration and weight files of the model at ``path``: names, sizes, contents.

    ``code``: Python files count too, because the engine runs them; by default they do not.  Words of a JSON file that
    say only where it came from do not count.  Raises :class:`ConfigError` if there are no weights.
    """
    started = time.monotonic()
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if _counts(file, code=code))
    if not path.is_file() and not any(file.suffix in _WEIGHTS for file in files):
        raise ConfigError(f"{path} holds no weight files ({', '.join(_WEIGHTS)}): the model cannot be identified")
    with ThreadPoolExecutor(4, thread_name_prefix="kv-tiering-digest") as pool:
        digests = list(pool.map(_digest, files))
    root = path.parent if path.is_file() else path
    total = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        total.update(f"{file.relative_to(root).as_posix()}\0{digest}\n".encode())
    seconds = time.monotonic() - started
    if seconds > _SLOW_SECONDS:
        logger.info(
            "took %.0f s to read the weights in order to identify them; a model with a commit (--revision) needs no reading",
            seconds,
        )
    return total.hexdigest()[:32]


def _counts(file: Path, *, code: bool) -> bool:
    return file.is_file() and (file.suffix in _WEIGHTS or file.name in _CONFIGS or (code and file.suffix == ".py"))


def _digest(file: Path) -> str:
    if file.suffix == ".json":
        try:
            content = json.dumps(meaning(json.loads(file.read_bytes())), sort_keys=True)
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
    """A configuration without the words that say nothing about what a model computes."""
    if isinstance(value, Mapping):
        return {word: meaning(item) for word, item in value.items() if word not in _NOT_CONTENT}
    return [meaning(item) for item in value] if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """``value`` as plain data that JSON can hold."""
    if isinstance(value, Mapping):
        return {str(word): plain(item) for word, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
