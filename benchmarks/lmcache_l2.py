"""LMCache's own benchmark of L2 adapters over these tiers, and over its file adapters.

The runners, the objects and the verification of ``lmcache bench l2`` of LMCache 0.5.6, in one process, so that the
adapters take turns and the start is not measured; each run has an empty directory. "tiers" is the adapter
``tiering.engines.lmcache`` with a ``primary`` smaller than the data and a ``local`` tier, which reads and writes past
the page cache, checks each block, and is bounded. ``fs`` and ``fs_native`` are LMCache's; "direct" means
``use_odirect``, the others read and write through the page cache, which holds all of the data here. A store to the
tiers ends when the objects are in ``primary``; those to the others when they are in files. CPU seconds are those of the
process while it stores and loads a GB each, with the writes behind the stores and without the zeros that the benchmark
writes before a load.

torch has one thread. Otherwise, most CPU seconds of a load are those of its threads, which zero memory for the
benchmark.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import Bench, Sample, cpu_seconds

SHAPES = {"4 MiB": (4 << 20, 16, 6, "2MiB", "128MiB"), "256 KiB": (256 << 10, 64, 17, "256KiB", "96MiB")}
"""Name of the objects' size → bytes, objects of a task, tasks, ``block_bytes``, ``primary``."""


def lacks() -> str:
    """Return what this benchmark lacks here."""
    missing = [name for name in ("lmcache", "aiofile") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed (make clean test-lmcache)" if missing else ""


def run(bench: Bench) -> None:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, shape in SHAPES.items():
            _compare(bench, name, *shape)
    finally:
        torch.set_num_threads(threads)
    bench.note(
        'Repeat with `make test-lmcache` and `PYTHONPATH=build/lmcache-0.5.6 make bench-vllm BENCH_ARGS="--only '
        'lmcache"`, or with `OMP_NUM_THREADS=1` and the command of the [guide](../docs/guides/lmcache.md).'
    )


def _compare(bench: Bench, name: str, nbytes: int, number: int, tasks: int, block: str, primary: str) -> None:
    def tiers(path: Path) -> Mapping[str, Any]:
        tier = {"type": "local", "path": str(path / "kv"), "capacity": "2GiB"}
        stack = {"primary": {"capacity": primary}, "secondary": [tier], "revision": "r1", "block_bytes": block}
        words = {"module_path": "tiering.engines.lmcache", "class_name": "KVTieringAdapter"}
        return {"type": "plugin", **words, "adapter_params": stack}

    def files(kind: str, *, direct: bool) -> Callable[[Path], Mapping[str, Any]]:
        return lambda path: {"type": kind, "base_path": str(path), **({"use_odirect": True} if direct else {})}

    specs: dict[str, Callable[[Path], Mapping[str, Any]]] = {"tiers": tiers}
    for kind in ("fs_native", "fs"):
        specs |= {f"{kind}, direct": files(kind, direct=True), kind: files(kind, direct=False)}

    def variant(spec: Callable[[Path], Mapping[str, Any]]) -> Callable[[], Sample]:
        def once() -> Sample:
            path = bench.directory / "adapter"
            path.mkdir()
            try:
                return _measure(spec(path), nbytes, number, 2 if bench.quick else tasks)
            finally:
                shutil.rmtree(path)

        return once

    title = (
        f"objects of {name}, {number} per task, {tasks - 1} tasks that count, block_bytes {block}, primary {primary}"
    )
    bench.compare(title, {name: variant(spec) for name, spec in specs.items()}, 5, unit="GB/s loaded", warmup=0)


def _measure(spec: Mapping[str, Any], nbytes: int, number: int, tasks: int) -> Sample:
    """Store and load all objects with LMCache's runners.

    Raises:
        RuntimeError: an object was not stored or loaded, or other bytes came back.
    """
    from lmcache.cli.commands.bench.l2_adapter_bench import data, runner
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

    memory = data.make_aligned_tensor(2 * number * nbytes, 4096)
    config = parse_args_to_l2_adapters_config(Namespace(l2_adapter=[json.dumps(spec)])).adapters[0]
    adapter = create_l2_adapter(config, l1_memory_desc=data.create_l1_memory_desc(memory, align_bytes=4096))
    stored, loaded = (data.make_memory_objects(memory, number, nbytes, n * number * nbytes, n) for n in (0, 1))
    zeroing = 0.0

    def empty(_: int) -> list[Any]:
        """Return the objects to load into, which the runner zeroes next; note what that costs."""
        nonlocal zeroing
        began = time.thread_time()
        for each in loaded:
            each.raw_data.zero_()
        zeroing += time.thread_time() - began
        return [loaded]

    def keys(task: int) -> list[Any]:
        return [data.make_object_keys(number, key_offset=task * number)]

    common = {"in_flight": 1, "num_keys": number, "data_size": nbytes, "rounds": tasks, "keys_for_round": keys}
    began = cpu_seconds()
    try:
        stores = runner.bench_store(adapter, **common, objs_for_round=lambda _: [stored], log=_ignore)
        loads = runner.bench_load(adapter, **common, objs_for_round=empty, log=_ignore)
        cpu = cpu_seconds() - began - 2 * zeroing
    finally:
        adapter.close()
    if sum(stores.success_counts + loads.success_counts) < 2 * tasks * number:
        raise RuntimeError(f"{spec['type']}: an object was not stored or not loaded")
    if not data.verify_round_trip(keys(tasks - 1)[0], stored, loaded, _ignore):
        raise RuntimeError(f"{spec['type']}: other bytes came back than were stored")
    task_bytes = number * nbytes / 1e9
    rates = [task_bytes * (tasks - 1) / sum(each.round_durations[1:]) for each in (stores, loads)]
    slowest = [max(each.round_durations[1:]) * 1e3 for each in (stores, loads)]
    extra = {"GB/s stored": rates[0], "slowest store ms": slowest[0], "slowest load ms": slowest[1]}
    return Sample(rates[1], cpu / (task_bytes * tasks), extra)


def _ignore(*_: object) -> None:
    """Leave out a line of LMCache's benchmark."""
