"""Which prompts are decoded: the repository's held-out prompts, MT-bench, Spec-Bench, or any file of prompts.

Spec-Bench (Xia et al., 2024) is 480 prompts in six groups; its first group is MT-bench's 80 two-turn questions in eight
categories. Both come from one file, taken from a path, from the user's cache, or downloaded once and checked against a
known sha256. It is never shipped with this program.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from medusa_train.config.catalog import HELDOUT_PROMPTS
from medusa_train.errors import UserError, nearest
from medusa_train.provenance import sha256_bytes, sha256_file, user_cache, write_atomic

MT_BENCH_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH_URL = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
SPEC_BENCH_SHA256 = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
NAMED_SUITES = ("heldout", "mt-bench", "spec-bench")


@dataclass(frozen=True)
class SuitePrompt:
    """One prompt.

    Attributes:
        context: (role, content) messages before the first turn to answer (a system prompt, earlier turns).
        turns: user turns to answer, in order; the model's own answer stands between them.
    """

    id: str
    category: str
    context: tuple[tuple[str, str], ...]
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    """Prompts to decode and where they came from."""

    name: str
    source: str
    sha256: str
    prompts: tuple[SuitePrompt, ...]

    def take(self, limit: int | None) -> Suite:
        """At most `limit` prompts, spread evenly over the categories in the order of the file; None takes all."""
        if limit is None or limit >= len(self.prompts):
            return self
        by_category: dict[str, list[int]] = {}
        for index, prompt in enumerate(self.prompts):
            by_category.setdefault(prompt.category, []).append(index)
        chosen: list[int] = []
        depth = 0
        while len(chosen) < limit:
            round_of_one = [members[depth] for members in by_category.values() if depth < len(members)]
            chosen += round_of_one[: limit - len(chosen)]
            depth += 1
        return replace(self, prompts=tuple(self.prompts[index] for index in sorted(chosen)))


def load_suite(name: str, *, suite_file: str | Path | None = None) -> Suite:
    """The prompts of a named suite or of a file.

    Args:
        name: "heldout", "mt-bench", "spec-bench", or a path to any file that `distill` reads as prompts.
        suite_file: the file to read a named suite from, instead of where it is looked for.

    Raises:
        UserError: no such suite or file, no network for a download, an empty file.
    """
    if name == "heldout":
        return _from_file(Path(suite_file) if suite_file else HELDOUT_PROMPTS, "heldout")
    if name in ("mt-bench", "spec-bench"):
        path = Path(suite_file) if suite_file else _spec_bench_path(name)
        suite = _from_file(path, name)
        if name == "mt-bench":
            kept = tuple(p for p in suite.prompts if p.category in MT_BENCH_CATEGORIES)
            if not kept:
                raise UserError(
                    "no MT-bench question in this file",
                    where=str(path),
                    allowed=f"rows of the categories {', '.join(MT_BENCH_CATEGORIES)}",
                )
            return replace(suite, prompts=kept)
        return replace(suite, prompts=tuple(map(_spec_bench_group, suite.prompts)))
    path = Path(name)
    if not path.exists():
        guess = nearest(name, NAMED_SUITES)
        raise UserError(
            f"no suite and no file is called {name!r}",
            where="--suite",
            allowed=f"{', '.join(NAMED_SUITES)}, or a path to a file of prompts",
            fix=None if guess is None else f"did you mean {guess!r}?",
        )
    return _from_file(path, path.name)


def _spec_bench_group(prompt: SuitePrompt) -> SuitePrompt:
    """Spec-Bench publishes one figure for all of MT-bench, beside its five other groups."""
    return replace(prompt, category="mt-bench") if prompt.category in MT_BENCH_CATEGORIES else prompt


def _from_file(path: Path, name: str) -> Suite:
    if not path.is_file():
        raise UserError(f"no such file of prompts for suite {name}", where=str(path))
    prompts = _bench_rows(path)
    if prompts is None:
        prompts = _any_prompts(path)
    if not prompts:
        raise UserError("this file holds no prompt", where=str(path), fix="give a file with at least one prompt")
    return Suite(name, str(path), sha256_file(path), _unique_ids(prompts))


def _bench_rows(path: Path) -> list[SuitePrompt] | None:
    """Rows of the MT-bench shape (`turns`: user turns only), or None where the file has another shape."""
    if path.suffix not in (".jsonl", ".json"):
        return None
    prompts: list[SuitePrompt] = []
    with open(path, encoding="utf-8") as handle:
        for number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            turns = row.get("turns") if isinstance(row, dict) else None
            if not isinstance(turns, list):
                if not prompts:
                    return None  # another shape: dataset.read_prompts knows the others
                raise UserError("a row without a list `turns` among rows that have one", where=f"{path}:{number}")
            if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
                raise UserError("`turns` must be non-empty user texts", where=f"{path}:{number}")
            identity = str(row.get("question_id", row.get("id", number)))
            prompts.append(SuitePrompt(identity, str(row.get("category") or "all"), (), tuple(turns)))
    return prompts


def _any_prompts(path: Path) -> list[SuitePrompt]:
    from medusa_train.dataset import read_prompts

    prompts = []
    for number, conversation in enumerate(read_prompts(path), start=1):
        messages = [(message.role, message.content) for message in conversation.messages]
        prompts.append(
            SuitePrompt(
                id=str(conversation.id or number),
                category=conversation.category or "all",
                context=tuple(messages[:-1]),
                turns=(messages[-1][1],),
            )
        )
    return prompts


def _unique_ids(prompts: Sequence[SuitePrompt]) -> tuple[SuitePrompt, ...]:
    # The journal is keyed by id: a file that repeats one must not make two prompts share a record.
    seen: dict[str, int] = {}
    result = []
    for prompt in prompts:
        seen[prompt.id] = seen.get(prompt.id, 0) + 1
        repeated = seen[prompt.id] > 1
        result.append(replace(prompt, id=f"{prompt.id}#{seen[prompt.id]}") if repeated else prompt)
    return tuple(result)


def _spec_bench_path(name: str) -> Path:
    cached = user_cache() / "suites" / "spec_bench_question.jsonl"
    if cached.is_file():
        return cached
    import httpx

    by_hand = f"fetch Spec-Bench's question.jsonl by other means and give it: --suite {name} --suite-file PATH"
    try:
        reply = httpx.get(SPEC_BENCH_URL, follow_redirects=True, timeout=30)
        reply.raise_for_status()
    except httpx.HTTPError as error:
        raise UserError(
            f"suite {name} is not on this machine and could not be downloaded ({type(error).__name__})",
            where=SPEC_BENCH_URL,
            fix=by_hand,
        ) from error
    if sha256_bytes(reply.content) != SPEC_BENCH_SHA256:
        raise UserError(
            "the downloaded file is not the Spec-Bench file that this program knows",
            where=SPEC_BENCH_URL,
            allowed=f"sha256 {SPEC_BENCH_SHA256}",
            fix=by_hand,
        )
    write_atomic(cached, reply.content)
    return cached
