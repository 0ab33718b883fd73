"""The results of an act, and their use in the demonstration's report."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TIERS = ("gpu", "cpu", "local", "s3")


@dataclass(slots=True)
class ActResult:
    """One act. Times in seconds, counts in tokens, sizes in bytes.

    ``answers``: "user/turn" → tokens; ``digests``: the same with a hash of all logits behind each token.
    ``recomputed_tokens`` are prompt tokens that were computed although the same engine, or the one before it, had
    computed their block already.
    """

    name: str
    answers: dict[str, list[int]] = field(default_factory=dict)
    digests: dict[str, list[int]] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    hit_tokens_by_tier: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    bytes_moved: dict[str, int] = field(default_factory=dict)
    corrupt_blocks: dict[str, int] = field(default_factory=dict)
    inherited_blocks: int = 0
    """Blocks that were found in the rows of an engine that has ended."""
    settled: bool = True
    kv_bytes: int = 0
    """KV of all distinct blocks of the act's prompts and answers."""

    def ttft(self, share: float) -> float:
        """The ``share``-quantile of the time to the first token."""
        if len(self.ttft_s) < 2:
            return self.ttft_s[0] if self.ttft_s else 0.0
        return statistics.quantiles(self.ttft_s, n=100, method="inclusive")[round(share * 100) - 1]

    def same_as(self, other: ActResult) -> bool:
        """Return True if every token of every answer, and the logits behind it to the last bit, are the same."""
        return bool(self.answers) and self.answers == other.answers and self.digests == other.digests

    def agrees_with(self, other: ActResult) -> bool:
        """Return True if each answer is the other act's, which may have more of them."""
        return bool(self.answers) and all(
            tokens == other.answers.get(name) and self.digests[name] == other.digests.get(name)
            for name, tokens in self.answers.items()
        )

    def different_answers(self, other: ActResult) -> list[str]:
        """The answers that are not the same."""
        return [
            name
            for name in other.answers
            if self.answers.get(name) != other.answers[name] or self.digests.get(name) != other.digests[name]
        ]

    def save(self, path: Path) -> None:
        """Write the result to ``path``."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> ActResult:
        """Read a result that was saved."""
        return cls(**json.loads(path.read_text()))

    def summary(self) -> dict[str, Any]:
        """Return the entry of this act in the report."""
        return {
            "name": self.name,
            "ttft_p50_s": self.ttft(0.50),
            "ttft_p95_s": self.ttft(0.95),
            "seconds": self.seconds,
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "hit_tokens_by_tier": self.hit_tokens_by_tier,
            "bytes_moved": self.bytes_moved,
            "corrupt_blocks": self.corrupt_blocks,
            "inherited_blocks": self.inherited_blocks,
        }


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold, whether it did, and what was seen."""

    name: str
    held: bool
    seen: str


def write_report(
    path: Path, acts: list[ActResult], controls: list[ActResult], checks: list[Check], seconds: float
) -> None:
    """Write ``report.json``."""
    held = {check.name: check.held for check in checks}
    report = {
        "identical_outputs": held.get("identical outputs", False),
        "corruption_caught": held.get("altered blocks are caught", False),
        "noop_load_detected": held.get("the comparison can fail", False),
        "all_held": bool(checks) and all(check.held for check in checks),
        "seconds": seconds,
        "acts": [act.summary() for act in acts],
        "controls": [act.summary() for act in controls],
        "checks": [asdict(check) for check in checks],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
