"""What computed the KV, read from vLLM's configuration: the weights, and everything else that changes bytes or their meaning.

vLLM's block hashes cover tokens, LoRA names, multimodal content and cache salts.  They do not cover the model, its weights, data types,
layout or parallelism: those are said here, for the namespace.  Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from tiering.errors import ConfigError

logger = logging.getLogger("kv_tiering.vllm")

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_CONFIGS = ("config.json", "params.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})(/|$)")
_CHUNK = 16 << 20
_SLOW_SECONDS = 5.0
_NOT_CONTENT = ("_name_or_path", "_commit_hash", "transformers_version")


def weights_identity(model_config: Any, load_format: str) -> str:
    """A commit of the model's repository, or a digest of its files' names and whole contents; never just a name.

    Reads all weight files of a local model that has no commit (the worker has just read them too).  Raises :class:`ConfigError` if
    the model cannot be identified, saying what to set.
    """
    model, revision = str(model_config.model), getattr(model_config, "revision", None)
    if load_format == "dummy":
        return f"dummy weights, seed {model_config.seed}"
    path = Path(model)
    if path.exists():
        snapshot = _SNAPSHOT.search(path.as_posix())
        return f"commit {snapshot.group(1)}" if snapshot else f"files {digest_of_files(path)}"
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    if not commit and isinstance(revision, str) and _COMMIT.fullmatch(revision):
        commit = revision
    if not isinstance(commit, str) or not commit:
        raise ConfigError(
            f"the weights of {model} cannot be identified (neither a local path nor a known commit), and weights change under a name: "
            "set --revision to a commit hash, or use a local copy of the model"
        )
    return f"commit {commit}"


def digest_of_files(path: Path) -> str:
    """Digest (32 hex digits) of the configuration and weight files of the model at ``path``: names, sizes, contents.

    Raises :class:`ConfigError` if there are none.
    """
    started = time.monotonic()
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if _counts(file))
    if not files:
        raise ConfigError(f"{path} holds no weight files ({', '.join(_WEIGHTS)}): the model cannot be identified")
    with ThreadPoolExecutor(4, thread_name_prefix="kv-tiering-digest") as pool:
        digests = list(pool.map(_digest, files))
    root = path.parent if path.is_file() else path
    total = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        total.update(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}\0{digest}\n".encode())
    seconds = time.monotonic() - started
    if seconds > _SLOW_SECONDS:
        logger.info(
            "took %.0f s to read the weights in order to identify them; a model with a commit (--revision) needs no reading",
            seconds,
        )
    return total.hexdigest()[:32]


def _counts(file: Path) -> bool:
    return file.is_file() and (file.suffix in _WEIGHTS or file.name in _CONFIGS)


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def overrides(vllm_config: Any, engine_version: str) -> dict[str, Any]:
    """Configuration that changes results or the bytes of a page beside weights, data types and layout, as plain data."""
    model = vllm_config.model_config
    hf_config = _plain(model.hf_config.to_dict())
    for word in _NOT_CONTENT:
        hf_config.pop(word, None)
    encoded = json.dumps(hf_config, sort_keys=True, default=str).encode()
    found: dict[str, Any] = {
        "engine": f"vllm {engine_version}",
        "hf_config": hashlib.sha256(encoded).hexdigest(),
        "hf_overrides": _describe(getattr(model, "hf_overrides", None)),
        "quantization": _describe(getattr(model, "quantization", None)),
        "quantization_config": _describe(getattr(model, "quantization_config", None)),
        "disable_sliding_window": bool(getattr(model, "disable_sliding_window", False)),
        "model_impl": str(getattr(model, "model_impl", "auto")),
    }
    if _rope_is_scaled(hf_config):
        found["max_model_len"] = int(model.max_model_len)  # some scalings choose their factors by it
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None:
        found["speculative"] = [str(getattr(speculative, word, None)) for word in ("method", "model", "revision")]
    return found


def _rope_is_scaled(hf_config: Mapping[str, Any]) -> bool:
    text = json.dumps(hf_config, default=str)
    return (
        bool(re.search(r'"(rope_type|type)": "(dynamic|longrope|su|yarn|linear|llama3|mrope)', text)) or '"rope_scaling": {' in text
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(word): _plain(item) for word, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _describe(value: Any) -> Any:
    """Plain data that changes whenever ``value`` does, as far as it can be told."""
    if isinstance(value, Callable):  # type: ignore[arg-type]
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}"
    return _plain(value)


def hash_seed(algorithm: str, environment_seed: str | None, default_seed: str) -> str:
    """The seed of vLLM's block hashes; "random" if it differs from process to process.

    ``environment_seed``: PYTHONHASHSEED.  ``default_seed``: what vLLM uses for cryptographic algorithms without it.
    """
    if environment_seed is not None:
        return f"PYTHONHASHSEED={environment_seed}"
    if algorithm.startswith("sha"):
        return default_seed
    return "random"
