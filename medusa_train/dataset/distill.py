"""`distill`: a model answers prompts, and what it said becomes rows with exactly the ids it emitted.

A job is a set of rows, each named by a hash of its prompt, the settings and the sample index. Resuming is a set
difference, a shard is a share of the names, and merging is a union.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_train.console import human_count, human_seconds, say
from medusa_train.dataset.conversations import Conversation, Message, read_prompts
from medusa_train.dataset.dialogue import Dialogue
from medusa_train.dataset.journal import Journal, manifest_name, read_manifest, shard_suffix
from medusa_train.dataset.render import stop_token_ids
from medusa_train.errors import UserError
from medusa_train.provenance import (
    canonical_json,
    command_line,
    library_versions,
    sha256_bytes,
    sha256_json,
    write_atomic,
)

DEFAULT_MAX_NEW_TOKENS = 512


@dataclass(frozen=True)
class DistillSettings:
    """What decides the text of a row; a change of any of these is another job.

    Attributes:
        max_new_tokens: per turn; None takes generation_config's, else 512.
        temperature: 0 is greedy.
        samples: answers per prompt.
        system: a system prompt for prompts that bring none.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    samples: int = 1
    seed: int = 0
    system: str | None = None

    def __post_init__(self) -> None:
        checks = [
            (
                "max-new-tokens",
                self.max_new_tokens,
                self.max_new_tokens is None or self.max_new_tokens >= 1,
                "1 or more",
            ),
            ("temperature", self.temperature, 0 <= self.temperature < 100, "0 (greedy) or more"),
            ("top-k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "0 < top-p <= 1"),
            ("samples", self.samples, self.samples >= 1, "1 or more"),
        ]
        for name, value, good, allowed in checks:
            if not good:
                raise UserError(f"--{name} {value}", allowed=allowed)
        if self.samples > 1 and self.temperature == 0:
            raise UserError(
                f"{self.samples} greedy samples of one prompt are all the same",
                fix="give --temperature above 0, or --samples 1",
            )


@dataclass
class JobCounts:
    """What a run did and what the journal holds."""

    rows: int = 0
    resumed: int = 0
    generated_tokens: int = 0
    finish: Counter = field(default_factory=Counter)
    skipped: Counter = field(default_factory=Counter)
    retokenized: int = 0

    def add(self, record: dict[str, Any]) -> None:
        """Counts one journal record."""
        self.rows += 1
        for part in [*record.get("earlier", ()), record]:
            self.generated_tokens += sum(end - start for start, end in part["loss_mask"])
        self.finish.update(record.get("finish_reasons") or [record["finish_reason"]])
        self.retokenized += not record["ids_exact"]

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "supervised_tokens": self.generated_tokens,
            "finish_reasons": dict(self.finish),
            "skipped": dict(self.skipped),
            "retokenized": self.retokenized,
        }


def resolve_settings(settings: DistillSettings, base: Any) -> dict[str, Any]:
    """The settings as numbers, `generation_config` consulted; what row ids and the manifest hold."""
    config = getattr(getattr(base, "model", None), "generation_config", None)
    longest = settings.max_new_tokens or getattr(config, "max_new_tokens", None) or DEFAULT_MAX_NEW_TOKENS
    return {
        "max_new_tokens": longest,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "samples": settings.samples,
        "seed": settings.seed,
        "system": settings.system,
        "stop_token_ids": sorted(stop_token_ids(base)),
    }


def prompts_from(paths: Sequence[str], system: str | None) -> tuple[list[Conversation], dict[str, Any]]:
    """All prompts, with the system turn added where one is given, and their part of the manifest.

    Raises:
        UserError: unreadable, of no known shape, or empty.
    """
    if not paths:
        return [], {"paths": [], "sha256": sha256_bytes(b""), "counts": {}}
    stream, digest, prompts = read_prompts(paths), hashlib.sha256(), []
    for prompt in stream:
        if system is not None and prompt.messages[0].role != "system":
            messages = (Message("system", system), *prompt.messages)
            prompt = Conversation(messages, prompt.source, prompt.category, prompt.id)
        prompts.append(prompt)
        digest.update(prompt.prompt_key.encode())
    stream.counts.check()
    say(
        f"{stream.counts.rows_in} prompts in = {len(prompts)} kept + {stream.counts.dropped} dropped"
        f" ({stream.counts.summary()})"
    )
    return prompts, {"paths": list(map(str, paths)), "sha256": digest.hexdigest(), "counts": stream.counts.as_dict()}


def dialogues_of(prompts: Iterable[Conversation], resolved: dict[str, Any], job_hash: str) -> list[Dialogue]:
    """Every row of the job, in order; prompts that occur twice are one."""
    found: dict[str, Dialogue] = {}
    for prompt in prompts:
        for sample in range(resolved["samples"]):
            name = sha256_json([prompt.prompt_key, job_hash, sample])[:24]
            if name not in found:
                seed = int.from_bytes(hashlib.sha256(f"{resolved['seed']}:{name}".encode()).digest()[:8], "big")
                found[name] = Dialogue(name, prompt, sample, seed)
    return list(found.values())


def in_shard(name: str, shard: tuple[int, int]) -> bool:
    """Whether row or slot `name` belongs to shard (i, n), 1-based."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % shard[1] == shard[0] - 1


def base_identity(base: Any, backend: str) -> dict[str, Any]:
    """The base's part of the manifest."""
    model = getattr(base, "model", None)
    return {
        "name": base.name,
        "revision": base.revision,
        "fingerprint": base.fingerprint if model is not None else None,
        "template_hash": base.template_hash,
        "dtype": None if model is None else str(model.dtype).removeprefix("torch."),
        "backend": backend,
    }


class Job:
    """One output folder being filled: journal, manifest, counts. Use as a context manager."""

    def __init__(self, out: str | Path, shard: tuple[int, int] = (1, 1)):
        self.out, self.shard = Path(out), shard
        self.journal = Journal(out, f"rows{shard_suffix(shard)}.jsonl")
        if self.journal.torn_bytes:
            say(f"{self.journal.path}: a half-written last line was removed; it will be made again")
        self.counts, self.manifest = JobCounts(), {}
        self.done: set[str] = set()
        try:
            for record in self.journal.read():
                self.done.add(record["id"])
                self.counts.add(record)
        except BaseException:
            self.journal.close()
            raise
        self._started, self._tokens = time.monotonic(), 0

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        self.journal.close()

    def begin(self, identity: dict[str, Any], resolved: dict[str, Any], prompts: dict[str, Any], backend: str) -> str:
        """Checks that the folder holds this very job or none, writes the manifest, returns the hash that names its
        rows."""
        job_hash = sha256_json({"base": identity, "settings": resolved})
        stored = read_manifest(self.out, self.shard)
        if stored is not None and stored.get("job_hash") != job_hash:
            raise UserError(
                "the folder holds rows of another job: " + _differences(stored, identity, resolved),
                where=str(self.out),
                fix="give another --out, or the settings it was begun with",
            )
        self.manifest = {
            "format": 1,
            "job_hash": job_hash,
            "base": identity,
            "settings": resolved,
            "prompts": prompts,
            "backend": backend,
            "shard": list(self.shard),
            "command": command_line(),
            "versions": library_versions(),
            "complete": False,
        }
        self.write_manifest()
        return job_hash

    def write_manifest(self, **more: Any) -> None:
        """Replaces the manifest as a whole."""
        self.manifest = {**self.manifest, "counts": self.counts.as_dict(), **more}
        write_atomic(self.out / manifest_name(self.shard), canonical_json(self.manifest) + "\n")

    def keep(self, dialogue: Dialogue, backend: str) -> None:
        """Writes a finished conversation to the journal."""
        record = dialogue.record(backend)
        self.journal.append(record)
        self.counts.add(record)

    def tokens(self, count: int) -> None:
        """Counts generated tokens for the rate, which is of generation alone: loading is not in it."""
        if not self._tokens:
            self._started = time.monotonic()
        self._tokens += count

    def rate_text(self) -> str:
        """Tokens so far and per second."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        return f"{human_count(self._tokens)} tokens, {self._tokens / seconds:,.0f} tokens/s"

    def finish(self, started: float) -> None:
        """Marks the job complete and says what it holds.

        Raises:
            UserError: every prompt was skipped.
        """
        counts = self.counts
        if counts.skipped and not counts.rows:
            self.write_manifest()
            reasons = ", ".join(f"{name} {count}" for name, count in counts.skipped.most_common())
            raise UserError(
                f"no prompt was answered; skipped: {reasons}",
                where=str(self.out),
                fix="give shorter prompts or a smaller --max-new-tokens",
            )
        self.write_manifest(complete=True)
        text = (
            f"{self.journal.path}: {counts.rows} rows ({counts.resumed} from before),"
            f" {human_count(counts.generated_tokens)} supervised tokens;"
            f" answers ended by stop token {counts.finish['stop']}, by length {counts.finish['length']}"
        )
        if counts.skipped:
            text += "; skipped: " + ", ".join(f"{name} {count}" for name, count in counts.skipped.most_common())
        if counts.retokenized:
            text += f"; {counts.retokenized} rows re-tokenized (the server returned no token ids)"
        say(f"{text}; {human_seconds(time.monotonic() - started)}, {self.rate_text()}")


def _differences(stored: dict[str, Any], identity: dict[str, Any], resolved: dict[str, Any]) -> str:
    found = []
    for old, new in ((stored.get("base", {}), identity), (stored.get("settings", {}), resolved)):
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                found.append(f"{name} {old.get(name)!r} there, {new.get(name)!r} now")
    return "; ".join(found)[:400] or "an older format"
