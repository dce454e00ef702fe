"""User turns that the model makes up itself: sampled after the template's user header, so that no seed data is needed.

Slot i of N has a few tries, each with a seed of its own; the first well-formed text is kept. What a slot yields
depends on nothing but the settings, so that shards and resumed runs make the same prompts as one run.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

from medusa_train.console import progress, say
from medusa_train.dataset.conversations import Conversation, Message
from medusa_train.dataset.distill import in_shard
from medusa_train.dataset.render import encode, stop_token_ids
from medusa_train.dataset.requests import Completion, Request
from medusa_train.dataset.run_local import engine_for
from medusa_train.dataset.sampling import Decoding
from medusa_train.dataset.templates import stop_strings, user_header

TRIES = 4
MIN_CHARACTERS, MIN_WORDS = 12, 3


def well_formed(text: str, markers: list[str]) -> str | None:
    """None where `text` reads like a user's turn, else the reason why it does not."""
    stripped = text.strip()
    words = re.findall(r"\w+", stripped.lower())
    if len(stripped) < MIN_CHARACTERS or len(words) < MIN_WORDS:
        return "too short"
    if "\ufffd" in text or any(marker in text for marker in markers):
        return "broken text"
    if sum(character.isalpha() for character in stripped) < len(stripped) / 3:
        return "few letters"
    if len(words) >= 12 and len(set(words)) < len(words) / 3:
        return "repeats itself"
    return None


def normal_form(text: str) -> str:
    """What two prompts must not share: letters and digits alone."""
    return " ".join(re.findall(r"\w+", text.lower()))


def synthesize(
    base: Any,
    count: int,
    out: str | Path,
    *,
    known: list[Conversation],
    system: str | None,
    seed: int,
    temperature: float,
    max_tokens: int,
    shard: tuple[int, int] = (1, 1),
    batch_tokens: int | None = None,
    max_rows: int | None = None,
) -> tuple[list[Conversation], dict[str, Any]]:
    """Up to `count` made-up prompts (this shard's share of them) and their part of the manifest.

    Every try is journaled in ``synthesized.jsonl`` under `out`; tries made before are not made again.
    """
    from medusa_train.dataset.journal import Journal, shard_suffix

    header, ending = user_header(base, system)
    header_ids = encode(base, header)
    stops = stop_token_ids(base) | set(encode(base, ending.strip())[:1] if ending.strip() else ())
    markers = stop_strings(base)
    slots = [slot for slot in range(count) if in_shard(f"slot {slot}", shard)]
    tries: dict[int, list[dict[str, Any]]] = {slot: [] for slot in slots}
    with Journal(out, f"synthesized{shard_suffix(shard)}.jsonl", required=("slot", "try", "text")) as journal:
        for record in journal.read():
            tries.get(record["slot"], []).append(record)
        open_slots = [slot for slot in slots if _open(tries[slot])]
        if open_slots:
            with progress("make up prompts", total=len(open_slots), unit="prompts") as bar:
                engine = engine_for(
                    base, Decoding(temperature), sorted(stops), batch_tokens=batch_tokens, max_rows=max_rows
                )

                def ask(slot: int) -> None:
                    number = len(tries[slot])
                    name = f"{seed}:slot {slot}:try {number}".encode()
                    own = int.from_bytes(hashlib.sha256(name).digest()[:8], "big")
                    engine.submit(Request(slot, header_ids, max_tokens, own, wave=0))

                def on_finish(completion: Completion) -> None:
                    slot = completion.request.key
                    text = _user_text(base, completion, ending)
                    verdict = "never ends" if text is None else well_formed(text, markers)
                    record = {"slot": slot, "try": len(tries[slot]), "text": text or "", "refused": verdict}
                    tries[slot].append(record)
                    journal.append(record)
                    if _open(tries[slot]):
                        ask(slot)
                    else:
                        bar.advance()

                for slot in open_slots:
                    ask(slot)
                engine.run(on_finish)
    return _select(tries, known, system, count)


def _open(records: list[dict[str, Any]]) -> bool:
    return len(records) < TRIES and not any(record["refused"] is None for record in records)


def _user_text(base: Any, completion: Completion, ending: str) -> str | None:
    """The made-up turn without what ends it; None where it did not end."""
    text = base.tokenizer.decode(completion.token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    marker = ending.strip()
    if marker and marker in text:
        return text.partition(marker)[0]
    if completion.finish_reason == "stop":
        return base.tokenizer.decode(
            completion.token_ids[:-1], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    return None


def _select(
    tries: dict[int, list[dict[str, Any]]], known: list[Conversation], system: str | None, count: int
) -> tuple[list[Conversation], dict[str, Any]]:
    seen = {normal_form(message.content) for prompt in known for message in prompt.messages if message.role == "user"}
    prompts, refused = [], Counter()
    for slot, records in sorted(tries.items()):
        refused.update(record["refused"] for record in records if record["refused"])
        for record in records:
            if record["refused"] is not None:
                continue
            text = record["text"].strip()
            if normal_form(text) in seen:
                refused["duplicate"] += 1
            else:
                seen.add(normal_form(text))
                turns = (Message("system", system),) if system is not None else ()
                name = f"synthesized-{slot:06d}"
                prompts.append(
                    Conversation((*turns, Message("user", text)), f"synthesized:{slot}", "synthesized", name)
                )
            break
    made = sum(len(records) for records in tries.values())
    words = ", ".join(f"{name} {number}" for name, number in refused.most_common()) or "none"
    say(f"{len(prompts)} made-up prompts for {len(tries)} asked; {made} tries, refused: {words}")
    return prompts, {"asked": count, "kept": len(prompts), "tries": made, "refused": dict(refused)}
