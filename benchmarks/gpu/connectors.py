"""Checks of the real vLLM on a GPU, with a model of a usual shape, beside vLLM's own connectors.

The model is a Llama of 8 billion parameters (fewer layers where the GPU's memory is small) with arbitrary weights in
bfloat16: its speed is real, its answers mean nothing; the tests with small models compare those. All engines are alive
at once, each in a process of its own, and answer in turns.
"""

from __future__ import annotations

import importlib.util
import json
import random
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine_processes import processes_of, receive
from benchmarks.gpu.checks import Check, NotHereError, require
from benchmarks.gpu.machine import Machine
from benchmarks.vllm_overhead_engine import Answered, Load, Setting, serve
from tests.vllm.rig import prepare_environment, transfer_config

ROUNDS = 5
"""Number of rounds that count, after one that does not."""
BLOCK, SMALL, MIDDLE, LONG = 16, 256 + 7, 4096, 16384
SINGLE, BATCH, AT_ONCE, OUTPUTS = 8, 40, 8, 4
"""Small prompts one by one, those of the batch, those of it at once, and the outputs of each of these."""
CAPACITY = 12 << 30
LAYER_BYTES = (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) * 2
TOKEN_BYTES = 2 * 8 * 128 * 2
"""Bytes of a token's keys and values in one layer."""
GPU_TOKENS = 20_480
"""Tokens whose keys and values an engine's own cache holds."""
NONE, CPU, SIMPLE, LOCAL = "none", "ours, CPU", "ours, simple", "ours, CPU + local"
PLAIN, CANONICAL = "plain rows", "canonical rows"
OFFLOADING, SIMPLE_OFFLOAD = "vLLM OffloadingConnector", "vLLM SimpleCPUOffload"
THEIRS = {OFFLOADING: "OffloadingConnector", SIMPLE_OFFLOAD: "SimpleCPUOffloadConnector"}

Round = dict[str, dict[str, Answered]]
"""Answers of each engine, by the part of the round."""


def write_model(directory: Path, layers: int) -> Path:
    """Write the configuration of a Llama with the shape of Llama 3 8B, but for the number of its layers."""
    directory.mkdir(exist_ok=True)
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(shape))
    return directory


def transfers(directory: Path) -> dict[str, dict[str, Any] | None]:
    """Return each engine's value of --kv-transfer-config."""
    disk = {"type": "local", "path": str(directory / "disk"), "capacity": "24GiB"}
    cpu = {"primary": {"capacity": CAPACITY}}
    found: dict[str, dict[str, Any] | None] = {NONE: None}
    for name, connector in THEIRS.items():
        words = {"cpu_bytes_to_use": CAPACITY}
        found[name] = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": words}
    found[CPU] = transfer_config(cpu)
    found[SIMPLE] = transfer_config(cpu | {"mode": "simple"})
    found[LOCAL] = transfer_config(cpu | {"secondary": [disk], "keep_secondary": True})
    return found


def options(layers: int, *, graphs: bool) -> dict[str, Any]:
    """Return vLLM's options for these engines: 20,000 tokens of KV, memory for several on one GPU.

    Args:
        layers: number of layers of the model.
        graphs: True for CUDA graphs of the small steps, False for eager steps.
    """
    captured = {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    return {
        **({"enforce_eager": False, "compilation_config": captured} if graphs else {}),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "block_size": BLOCK,
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": GPU_TOKENS * TOKEN_BYTES * layers,
        "gpu_memory_utilization": 0.05,
        "max_model_len": LONG + 512,
        "max_num_batched_tokens": 4096,
    }


def connectors(machine: Machine, *, graphs: bool) -> str:
    """Compare the time to the first token and the engine thread's cost with vLLM's own connectors."""
    return _side_by_side(machine, transfers, {}, graphs=graphs)


def canonical(machine: Machine) -> str:
    """Compare engines with canonical and with plain rows, where heads lie outside tokens."""
    return _side_by_side(machine, layouts, {"VLLM_KV_CACHE_LAYOUT": "HND"}, graphs=True)


def layouts(directory: Path) -> dict[str, dict[str, Any] | None]:
    """Return --kv-transfer-config of an engine without tiers, and of one with each layout of rows."""
    found: dict[str, dict[str, Any] | None] = {NONE: None}
    for name, layout in ((PLAIN, "plain"), (CANONICAL, "canonical")):
        disk = {"type": "local", "path": str(directory / layout), "capacity": "24GiB"}
        found[name] = transfer_config({"primary": {"capacity": CAPACITY}, "secondary": [disk], "layout": layout})
    return found


def _side_by_side(
    machine: Machine,
    configurations: Callable[[Path], dict[str, dict[str, Any] | None]],
    environment: dict[str, str],
    *,
    graphs: bool,
) -> str:
    layers = layers_for(machine, len(configurations(Path())))
    with tempfile.TemporaryDirectory(prefix="kv-gpu-") as scratch:
        model = write_model(Path(scratch) / "model", layers)
        settings = {
            name: (Setting(model, transfer, environment, options=options(layers, graphs=graphs)),)
            for name, transfer in configurations(Path(scratch)).items()
        }
        with processes_of(serve, settings) as engines:
            rounds = [one_round(number, engines) for number in range(ROUNDS + 1)][1:]
    return "\n          ".join(table(rounds, layers))


def one_round(number: int, engines: Mapping[str, Connection]) -> Round:
    """Return how each engine has answered the round's requests."""
    order = list(engines)
    random.Random(number).shuffle(order)
    return {name: turn(name, engines[name], 1000 * number) for name in order}


def turn(name: str, engine: Connection, seed: int) -> dict[str, Answered]:
    """Return how one engine has answered the parts of a round, what is new and the same from its tiers."""
    loads = {
        "small": Load(tuple(range(seed, seed + SINGLE)), SMALL, 1),
        "batch": Load(tuple(range(seed + 100, seed + 100 + BATCH)), SMALL, OUTPUTS, AT_ONCE),
        "middle": Load((seed + 500,), MIDDLE, 1),
        "long": Load((seed + 600,), LONG, 1),
    }
    parts: dict[str, Answered] = {}
    for part, load in loads.items():
        parts[part] = _send(engine, load)
        if part == "small":
            parts["small, own cache"] = _send(engine, load)
        _send(engine, "gpu")
        if name == NONE:
            continue
        parts[part + ", tier"] = found = _send(engine, load)
        whole = min(found.cached) >= load.length - BLOCK
        require(whole or name in THEIRS, f"{name}, {part}: {found.cached} tokens of {load.length} were cached")
        _send(engine, "gpu")
        if name == LOCAL:
            _send(engine, "cpu")
            parts[part + ", disk"] = found = _send(engine, load)
            require(min(found.cached) >= load.length - BLOCK, f"{name}, {part}: {found.cached} tokens from the disk")
            _send(engine, "gpu")
    return parts


def table(rounds: list[Round], layers: int) -> list[str]:
    """Return the lines of the table: medians over the rounds."""
    parts = ("small", "small, own cache", "small, tier", "middle", "middle, tier", "long", "long, tier")
    title = (
        f"{layers} layers, {len(rounds)} rounds. TTFT in ms: {'; '.join(parts)}; GB/s of the last, "
        "ms of the engine's thread per request of the batch beyond none (new; tier), the longest tail in s, and what "
        "the disk gave"
    )
    lines = [title]
    none = [answered[NONE]["batch"].thread for answered in rounds]
    for name in sorted(rounds[0]):
        mine = [answered[name] for answered in rounds]
        ttft = {part: median(median(parts[part].ttft) for parts in mine) * 1e3 for part in mine[0]}
        cells = [f"{ttft[part]:.2f}" if part in ttft else "-" for part in parts]
        if "long, tier" in ttft:
            cells.append(f"{LONG * TOKEN_BYTES * layers / ttft['long, tier'] / 1e6:.1f}")
        for part in ("batch", "batch, tier"):
            if part in ttft:
                beyond = [(parts[part].thread - base) / BATCH for parts, base in zip(mine, none, strict=True)]
                cells.append(f"{median(beyond) * 1e3:.2f}")
        cells.append(f"{max(answered.tail for parts in mine for answered in parts.values()):.2f}")
        cells += [f"{part}: {value:.2f}" for part, value in ttft.items() if part.endswith("disk")]
        lines.append(f"{name:>26} | " + " | ".join(cells))
    return lines


def layers_for(machine: Machine, engines: int) -> int:
    """Return the number of layers with which all engines fit into the GPU's memory.

    Raises:
        NotHereError: there is no GPU, or no vLLM that can use it.
    """
    if not machine.is_gpu or importlib.util.find_spec("vllm") is None:
        raise NotHereError("it needs a GPU, and vLLM for it in this environment")
    prepare_environment()
    return layers_that_fit(machine.free(), engines)


def layers_that_fit(free: int, engines: int) -> int:
    """Return the number of layers, from 2 to 32, with which ``engines`` fit into ``free`` bytes."""
    each = free // engines - (9 << 29)  # without embeddings, activations and the context
    return max(2, min(32, each // (LAYER_BYTES + GPU_TOKENS * TOKEN_BYTES)))


def _send(engine: Connection, order: Load | str) -> Any:
    """Return an engine's answer to ``order``."""
    engine.send(order)
    answered = receive(engine)
    require(bool(answered), f"{order!r} was refused")
    return answered


CHECKS = (
    Check(
        "connectors", "tiers serve what vLLM's own do, side by side, with CUDA graphs", partial(connectors, graphs=True)
    ),
    Check("eager connectors", "the same in eager steps", partial(connectors, graphs=False)),
    Check("canonical engines", "canonical rows are as fast as plain ones in an engine", canonical),
)
