"""The acts and the negative controls ("attempts to cheat"), and the checks of their results."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from examples import s3_server
from examples.demo.act import ActSettings
from examples.demo.display import MEBI, Display
from examples.demo.machine import serving
from examples.demo.report import ActResult, Check
from examples.demo.tamper import flip_blocks
from examples.demo.workload import Shape, Workload
from examples.mini_engine import EngineOptions, ModelConfig, Request
from tiering import make_offload_key

BUCKET = "kv-cache"
ACT_TIMEOUT = 280.0
"""Seconds after which an act is given up."""


class ActFailed(Exception):
    """The failure of an act's process; the message has the reason."""


@dataclass(slots=True)
class Story:
    """The player of the acts; ``gpu_blocks`` and ``cpu_bytes`` are too small for the workload on purpose."""

    directory: Path
    display: Display
    shape: Shape = field(default_factory=Shape)
    gpu_blocks: int = 192
    cpu_bytes: int = 64 * MEBI
    acts: list[ActResult] = field(default_factory=list)
    machine: list[ActResult] = field(default_factory=list)
    controls: list[ActResult] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def tell(self) -> None:
        """Play all acts and controls; the results are in ``acts``, ``controls`` and ``checks``.

        Raises:
            ActFailed: the process of an act failed.
        """
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        workload = Workload(self.shape)
        self._introduce(workload)
        first = self._play("1 no tiers", "The GPU's pool alone: what falls out of it is computed again.", None)
        with contextlib.ExitStack() as stack:
            server = s3_server.start(self.directory / "s3")
            stack.callback(s3_server.stop, server.process)
            s3_server.create_bucket(server, BUCKET)
            environment = server.environment()
            tiers = self._tiers(server, self.directory / "local")
            self._say_s3(server)
            why = (
                "CPU memory → local disk → S3. Every block that is computed is offered to all of them; "
                "blocks that leave the GPU are loaded again.\n"
                "The first turn begins cold: no block can be loaded, and all blocks are stored. "
                "From the second turn on the tiers pay."
            )
            self._play("2 three tiers", why, tiers, environment)
            why = (
                "The engine's process was stopped and starts again. "
                "GPU and CPU memory are empty; the local disk is warm."
            )
            self._play("3 restarted", why, tiers, environment, seen="2 three tiers")
            elsewhere = self._tiers(server, self.directory / "local of a new machine")
            why = "Another machine: an empty local disk, nothing but the bucket."
            self._play("4 new machine", why, elsewhere, environment, seen="2 three tiers")
            self._share_a_machine()
            self._alter_blocks(workload, tiers, environment)
            self._break_loads(elsewhere, environment)
        self._conclude(first)

    def tidy(self) -> None:
        """Remove the tiers' data; settings, results and logs stay."""
        for data in ("s3", "local", "local of a new machine", "local of the service"):
            shutil.rmtree(self.directory / data, ignore_errors=True)

    # --------------------------------------------------------------------------------------------------------- the acts

    def _play(
        self,
        name: str,
        why: str,
        stack: dict[str, Any] | None,
        environment: dict[str, str] | None = None,
        seen: str | None = None,
    ) -> ActResult:
        self.display.heading(f"Act {name}")
        self.display.say(why)
        result = self._run(name, stack, environment or {}, seen)
        self.acts.append(result)
        first = self.acts[0]
        line = (
            f"-> time to first token: median {result.ttft(0.5):.2f} s, 95% {result.ttft(0.95):.2f} s; "
            f"{result.seconds:.0f} s in all"
        )
        if result is not first:
            cached = 1 - result.computed_tokens / result.prompt_tokens
            line += f"; {cached:.0%} of the prompts' tokens came from a cache; "
            line += "every answer identical to act 1" if result.same_as(first) else "ANSWERS DIFFER from act 1"
        self.display.say(line)
        return result

    def _run(
        self,
        name: str,
        stack: dict[str, Any] | None,
        environment: dict[str, str],
        seen: str | None,
        broken_loads: bool = False,
        shape: Shape | None = None,
        inherits: float = 0.0,
        meanwhile: Callable[[], None] | None = None,
    ) -> ActResult:
        """Run one act in a process of its own; raise :class:`ActFailed` if the process fails.

        With ``meanwhile``, the act's engine stays up for that function, and is killed then.
        """
        place = self.directory / name.replace(" ", "-")
        place.mkdir()
        if seen is not None:
            shutil.copy(self.directory / seen.replace(" ", "-") / "seen", place / "seen")
        settings = ActSettings(
            name=name,
            result=str(place / "result.json"),
            seen=str(place / "seen"),
            log=str(place / "log"),
            stack=stack,
            broken_loads=broken_loads,
            inherits=inherits,
            holds=meanwhile is not None,
            num_blocks=self.gpu_blocks,
            shape=asdict(shape or self.shape),
        )
        settings.save(place / "settings.json")
        command = [sys.executable, "-m", "examples.demo.act", str(place / "settings.json")]
        inherited = {word: value for word, value in os.environ.items() if not word.startswith("AWS_")}
        environment = inherited | environment | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        with (place / "errors").open("wb") as errors:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.PIPE, env=environment
            )
        watchdog = threading.Timer(ACT_TIMEOUT, process.kill)
        watchdog.start()
        try:
            with self.display.progress(name) as progress:
                for line in process.stdout or ():
                    sign = json.loads(line)
                    if sign["phase"] == "hold":
                        break
                    progress.update(sign)
            if meanwhile is not None and process.poll() is None:
                meanwhile()
                process.kill()
            code = process.wait()
        finally:
            overdue = not watchdog.is_alive()
            watchdog.cancel()
            if process.poll() is None:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        if overdue:
            raise ActFailed(f"act {name} did not end within {ACT_TIMEOUT:.0f} s; what it did is in {place}")
        if code != (0 if meanwhile is None else -signal.SIGKILL):
            tail = "\n".join((place / "errors").read_text(errors="replace").strip().splitlines()[-12:])
            raise ActFailed(f"act {name} ended with code {code}; its last words (all of them are in {place}):\n{tail}")
        return ActResult.load(place / "result.json")

    # -------------------------------------------------------------------------------------------- one cache per machine

    def _share_a_machine(self) -> None:
        """Let two engines share a service, and kill one of them, which starts again."""
        self.display.heading("Act 5 one machine")
        self.display.say(
            "Two engines share the disk of one service (kv-tiering serve), for a part of the questions. The first\n"
            "engine is killed and starts again: the rows of its CPU tier are memory of the service, and outlive it."
        )
        shape = replace(self.shape, users=min(3, self.shape.users), turns=min(2, self.shape.turns))
        disk = {"type": "local", "path": str(self.directory / "local of the service"), "capacity": "256MiB"}
        results: dict[str, ActResult] = {}

        def play(name: str, what: str, **words: Any) -> None:
            self.display.say(what)
            stack = {"primary": {"capacity": self.cpu_bytes}, "machine": machine, "salt": words.pop("salt", "")}
            results[name] = self._run(name, stack, {}, None, shape=shape, **words)

        with serving(self.directory, disk, self.cpu_bytes) as path:
            machine = {"socket": str(path), "tiers": ["local"], "keep_rows": True, "lookup_deadline": "10s"}
            play(
                "5 first of two",
                "The first engine, cold:",
                meanwhile=lambda: play("5 second of two", "The second engine, while the first one runs:"),
            )
            play("5 killed, back", "The first engine, killed and started again:", inherits=60.0)
            play("other salt", "Attempt to cheat: an engine with another salt:", salt="another tenant", inherits=2.0)
        control = results.pop("other salt")
        second, back = results["5 second of two"], results["5 killed, back"]
        self.machine += results.values()
        self.controls.append(control)
        size = EngineOptions().block_size
        hits = back.hit_tokens_by_tier["cpu"]
        self.display.say(
            f"-> the second engine computed {second.computed_tokens:,} of {second.prompt_tokens:,} tokens; the first "
            f"came back to {back.inherited_blocks * size:,} tokens in its rows, and computed {back.computed_tokens:,}"
        )
        shared = second.hit_tokens_by_tier["local"]
        agree = all(result.agrees_with(self.acts[0]) for result in (*results.values(), control))
        counted = f"{sum(len(result.answers) for result in results.values())} answers of two engines and a restart"
        found = f"with another salt: {control.inherited_blocks} blocks in rows, "
        found += f"{control.hit_tokens_by_tier['local']:,} tokens from the disk"
        self.checks += [
            Check("two engines share one disk", shared > 0, f"{shared:,} tokens came from what the other had stored"),
            Check(
                "a killed engine comes back warm", back.inherited_blocks > 0 < hits, f"{hits:,} tokens from its rows"
            ),
            Check("the service changes no answer", agree, counted),
            Check(
                "another tenant finds nothing",
                control.inherited_blocks == 0 == control.hit_tokens_by_tier["local"]
                and control.computed_tokens == results["5 first of two"].computed_tokens,
                found,
            ),
        ]

    # ------------------------------------------------------------------------------------------------ negative controls

    def _alter_blocks(self, workload: Workload, tiers: dict[str, Any], environment: dict[str, str]) -> None:
        self.display.heading("Attempt to cheat: altered blocks")
        keys = [self._key(workload, user, block) for user, block in ((0, 20), (1, 5), (2, 0))]
        on_disk = flip_blocks(self.directory / "local", keys)
        in_bucket = flip_blocks(self.directory / "s3", keys)
        self.display.say(
            f"One bit in {len(keys)} blocks was flipped without the tiers' knowledge, in all {on_disk} copies on the "
            f"disk and {in_bucket} in the bucket. The engine starts again with these tiers."
        )
        result = self._run("altered blocks", tiers, environment, "2 three tiers")
        self.controls.append(result)
        caught = sum(result.corrupt_blocks.values())
        held = on_disk > 0 and in_bucket > 0 and all(result.corrupt_blocks.values()) and result.same_as(self.acts[0])
        seen = (
            f"{caught} refused ({_counts(result.corrupt_blocks)}), "
            f"{result.recomputed_tokens} tokens computed again, answers "
        )
        seen += "identical" if result.same_as(self.acts[0]) else "DIFFERENT"
        self.display.say("-> " + seen)
        self.checks.append(Check("altered blocks are caught", held, seen))

    def _break_loads(self, tiers: dict[str, Any], environment: dict[str, str]) -> None:
        self.display.heading("Attempt to cheat: loads that copy nothing")
        self.display.say(
            "A useful comparison must fail when blocks are reported as loaded although no byte was copied."
        )
        result = self._run("broken loads", tiers, environment, "2 three tiers", broken_loads=True)
        self.controls.append(result)
        different = result.different_answers(self.acts[0])
        tokens = sum(result.answers[name] != self.acts[0].answers[name] for name in result.answers)
        seen = f"{len(different)} of {len(self.acts[0].answers)} answers differ ({tokens} of them in their tokens)"
        self.display.say("-> " + seen)
        self.checks.append(Check("the comparison can fail", tokens > 0, seen))

    def _key(self, workload: Workload, user: int, block: int) -> bytes:
        request = Request("", workload.users[user].opening)
        request.update_hashes(EngineOptions().block_size)
        return make_offload_key(request.block_hashes[block], 0)

    # ------------------------------------------------------------------------------------------------------ conclusions

    def _conclude(self, first: ActResult) -> None:
        tiered = self.acts[1:]
        tokens = sum(map(len, first.answers.values()))
        wrong = [
            f"act {act.name}: {', '.join(act.different_answers(first)[:3])}" for act in tiered if not act.same_as(first)
        ]
        seen = (
            "; ".join(wrong)
            or f"{tokens} tokens in {len(first.answers)} answers, and the logits behind each of them to the last bit, "
            f"in {len(tiered)} acts"
        )
        checks = [Check("identical outputs", not wrong, seen)]
        second, third, fourth = tiered
        for name, act, tier in (
            ("the CPU tier was used", second, "cpu"),
            ("the local disk was used", second, "local"),
            ("a restart begins warm from the local disk", third, "local"),
            ("a new machine begins warm from S3", fourth, "s3"),
        ):
            hits = act.hit_tokens_by_tier[tier]
            checks.append(Check(name, hits > 0, f"{hits:,} tokens came from {tier} in act {act.name}"))
        worse = [act.name for act in tiered if act.recomputed_tokens * 4 > first.recomputed_tokens]
        seen = ", ".join(f"{act.recomputed_tokens:,} in act {act.name}" for act in self.acts)
        checks.append(Check("little is computed twice", not worse, seen))
        lost = [act.name for act in (*tiered, *self.machine, *self.controls) if not act.settled]
        checks.append(
            Check(
                "every store ended",
                not lost,
                f"stores were still running after act {', '.join(lost)}" if lost else "nothing was pending",
            )
        )
        self.checks = checks + self.checks

    # ----------------------------------------------------------------------------------------------------------- set-up

    def _tiers(self, server: s3_server.S3Server, local: Path) -> dict[str, Any]:
        return {
            "primary": {"capacity": self.cpu_bytes},
            "secondary": [
                {"type": "local", "path": str(local), "capacity": "256MiB", "segment_size": "32MiB"},
                {
                    "type": "s3",
                    "bucket": BUCKET,
                    "prefix": "demo/",
                    "endpoint_url": server.endpoint,
                    "region": "us-east-1",
                },
            ],
        }

    def _introduce(self, workload: Workload) -> None:
        shape, model, size = self.shape, ModelConfig(), EngineOptions().block_size
        token_bytes = model.layers * 2 * model.kv_heads * model.head_dim * 4
        distinct = shape.documents * shape.document_tokens + workload.requests * (shape.answer_tokens + 20)
        self.display.heading("What this shows")
        self.display.say(
            f"{shape.users} users ask about {shape.documents} modules of Python's own library "
            f"({', '.join(user.document.name for user in workload.users[: shape.documents])}),\n"
            f"{shape.turns} turns each, {shape.at_once} of them at a time. A small transformer with random weights "
            "answers: gibberish, but gibberish in which\n"
            f"every token depends on all the text before it. Its KV cache needs {token_bytes / 1024:.0f} KiB a token, "
            f"about {distinct * token_bytes / MEBI:.0f} MiB for all conversations;\n"
            f"the GPU's pool holds {self.gpu_blocks * size * token_bytes / MEBI:.0f} MiB, the CPU tier "
            f"{self.cpu_bytes / MEBI:.0f} MiB. Blocks that neither holds are computed again, or come from a slower "
            "tier.\n"
            "All acts ask the same questions; the answers must be the same, token by token and bit by bit."
        )

    def _say_s3(self, server: s3_server.S3Server) -> None:
        self.display.say(f"\n(An S3 server was started on {server.endpoint}, process {server.process.pid}.)")


def _counts(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name}: {number}" for name, number in numbers.items())
