"""User turns that the model makes up itself: sampled after the template's user header, so that no seed data is needed.

Slot i of N has a few tries, each with a seed of its own; the first well-formed text that no prompt and no earlier slot
has is kept. What a slot yields depends on nothing but the settings, so that shards and resumed runs make the same
prompts as one run. For that a shard has to know the texts of all slots: it makes its own up first, reads what other
shards have journaled in the same folder, and makes up the rest itself; it answers its own alone.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
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

# Tries of a slot: at most this many that are not well-formed, and this many in all where the text is a duplicate.
TRIES, LONGEST_SEARCH = 4, 12
MIN_CHARACTERS, MIN_WORDS = 12, 3
TRY_FIELDS = ("slot", "try", "text", "refused")


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
    """Up to `count` made-up prompts, no two alike (of these, this shard's share), and their part of the manifest.

    Every try is journaled in ``synthesized.jsonl`` under `out`; tries made before are not made again.
    """
    from medusa_train.dataset.journal import Journal, shard_suffix

    header, ending = user_header(base, system)
    header_ids = encode(base, header)
    stops = stop_token_ids(base) | set(encode(base, ending.strip())[:1] if ending.strip() else ())
    markers = stop_strings(base)
    taken = {normal_form(message.content) for prompt in known for message in prompt.messages if message.role == "user"}
    slots = Slots(count, taken)
    own = {slot for slot in range(count) if in_shard(f"slot {slot}", shard)}
    with Journal(out, f"synthesized{shard_suffix(shard)}.jsonl", required=TRY_FIELDS) as journal:
        for record in journal.read():
            slots.add(record)
        slots.read_others(out, journal.path)
        if not slots.open():
            return slots.chosen(own, system)
        engine = engine_for(base, Decoding(temperature), sorted(stops), batch_tokens=batch_tokens, max_rows=max_rows)

        def ask(slot: int) -> None:
            name = f"{seed}:slot {slot}:try {len(slots.tries[slot])}".encode()
            own_seed = int.from_bytes(hashlib.sha256(name).digest()[:8], "big")
            engine.submit(Request(slot, header_ids, max_tokens, own_seed, wave=0))

        def on_finish(completion: Completion) -> None:
            slot = completion.request.key
            text = _user_text(base, completion, ending)
            verdict = "never ends" if text is None else well_formed(text, markers)
            record = {"slot": slot, "try": len(slots.tries[slot]), "text": text or "", "refused": verdict}
            slots.add(record)
            journal.append(record)
            if verdict is not None and _verdict(slots.tries[slot], set())[1]:
                ask(slot)
            else:
                bar.advance()

        with progress("make up prompts", total=None, unit="prompts") as bar:
            for mine in (True, False):
                # Duplicates show only once the slots before have their texts: round by round until none is open.
                while waiting := [slot for slot in slots.open() if not mine or slot in own]:
                    for slot in waiting:
                        ask(slot)
                    engine.run(on_finish)
                if mine:
                    slots.read_others(out, journal.path)
    return slots.chosen(own, system)


class Slots:
    """The tries of every slot, and which text each slot has in the end.

    Args:
        count: slots.
        taken: normal forms of the texts that no slot may have.
    """

    def __init__(self, count: int, taken: set[str]) -> None:
        self.tries: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self._taken = taken

    def add(self, record: dict[str, Any]) -> None:
        """One try; others of the same number, and of slots that are not asked for, are passed over."""
        if record["slot"] < len(self.tries) and record["try"] == len(self.tries[record["slot"]]):
            self.tries[record["slot"]].append(record)

    def read_others(self, folder: str | Path, own: Path) -> None:
        """Adds what other shards have journaled in the same folder so far."""
        from medusa_train.dataset.journal import read_journal

        for path in sorted(Path(folder).glob("synthesized*.jsonl")):
            if path.name != own.name:
                for _, record in read_journal(path, TRY_FIELDS):
                    self.add(record)

    def _walk(self) -> Iterator[tuple[int, str | None, bool]]:
        """(slot, its text or None, whether it may be tried again) in the order of slots: earlier slots come first."""
        seen = set(self._taken)
        for slot, records in enumerate(self.tries):
            text, more = _verdict(records, seen)
            if text is not None:
                seen.add(normal_form(text))
            yield slot, text, more

    def open(self) -> list[int]:
        """Slots without a text that may be tried again."""
        return [slot for slot, text, more in self._walk() if text is None and more]

    def chosen(self, own: set[int], system: str | None) -> tuple[list[Conversation], dict[str, Any]]:
        """The prompts of the slots in `own`, and the manifest's facts about all slots; says what came of them."""
        prompts, kept = [], 0
        refused = Counter(record["refused"] for records in self.tries for record in records if record["refused"])
        for slot, text, _ in self._walk():
            good = sum(record["refused"] is None for record in self.tries[slot])
            refused["duplicate"] += good - (text is not None)
            kept += text is not None
            if text is not None and slot in own:
                turns = (Message("system", system),) if system is not None else ()
                name = f"synthesized-{slot:06d}"
                prompts.append(
                    Conversation((*turns, Message("user", text)), f"synthesized:{slot}", "synthesized", name)
                )
        made, count = sum(map(len, self.tries)), len(self.tries)
        words = ", ".join(f"{name} {number}" for name, number in refused.most_common() if number) or "none"
        say(f"{kept} made-up prompts for {count} asked; {made} tries, refused: {words}")
        if kept < count:
            say(
                f"{count - kept} prompts are short: their slots had {TRIES} ill-formed texts or {LONGEST_SEARCH} tries;"
                " another --synthesize-temperature or more --prompts may help"
            )
        facts = {"asked": count, "kept": kept, "tries": made, "refused": {k: v for k, v in refused.items() if v}}
        return prompts, facts


def _verdict(records: list[dict[str, Any]], seen: set[str]) -> tuple[str | None, bool]:
    """The first well-formed text that is not in `seen`, and whether a slot with these tries may have another."""
    bad = 0
    for record in records[:LONGEST_SEARCH]:
        bad += record["refused"] is not None
        if bad >= TRIES:
            return None, False
        if record["refused"] is None and normal_form(record["text"]) not in seen:
            return record["text"].strip(), False
    return None, len(records) < LONGEST_SEARCH


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
