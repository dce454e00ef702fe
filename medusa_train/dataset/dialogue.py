"""One conversation being distilled: its questions are known, its answers come in one after another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from medusa_train.dataset.conversations import Conversation
from medusa_train.dataset.journal import spans_of
from medusa_train.dataset.render import Rendered


@dataclass
class Dialogue:
    """A prompt, the answers so far, and the token rows they make.

    Attributes:
        id: hash of prompt, settings and sample index.
        sample: which of several answers to one prompt.
        parts: finished token rows; turns share the last one as long as its ids are what the next turn is asked with.
    """

    id: str
    prompt: Conversation
    sample: int
    seed: int
    messages: list[dict[str, str]] = field(default_factory=list)
    parts: list[Rendered] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    generated: int = 0
    exact: bool = True

    def __post_init__(self) -> None:
        self._waiting = self.prompt.as_dicts()
        self._ask()

    @property
    def turn(self) -> int:
        """Answers so far."""
        return len(self.finish_reasons)

    @property
    def done(self) -> bool:
        return not self.messages or self.messages[-1]["role"] == "assistant"

    def _ask(self) -> None:
        while self._waiting:
            self.messages.append(self._waiting.pop(0))
            if self.messages[-1]["role"] == "user":
                return

    def answer(self, text: str, prompt_ids: list[int], answer_ids: list[int], finish_reason: str, exact: bool) -> None:
        """Takes one answer (`answer_ids` with the stop token where one was emitted) and asks the next question."""
        self.messages.append({"role": "assistant", "content": text})
        self.finish_reasons.append(finish_reason)
        self.generated += len(answer_ids)
        self.exact = self.exact and exact
        ids = np.asarray([*prompt_ids, *answer_ids], dtype=np.int32)
        mask = np.zeros(len(ids), dtype=np.uint8)
        mask[len(prompt_ids) :] = 1
        if self.parts:
            last = self.parts[-1]
            known = len(last.input_ids)
            if known <= len(prompt_ids) and np.array_equal(last.input_ids, ids[:known]):
                mask[:known] = last.loss_mask
                self.parts.pop()
        self.parts.append(Rendered(ids, mask))
        self._ask()

    def give_up(self) -> None:
        """Ends the conversation before its next question (which does not fit the model, say)."""
        if not self.done:
            self.messages.pop()
        self._waiting = []

    def record(self, backend: str) -> dict[str, Any]:
        """The journal line."""
        *earlier, last = [
            {"input_ids": part.input_ids.tolist(), "loss_mask": spans_of(part.loss_mask)} for part in self.parts
        ]
        record = {
            "id": self.id,
            "prompt_id": self.prompt.id or self.prompt.prompt_key,
            "prompt_key": self.prompt.prompt_key,
            "source": self.prompt.source,
            "category": self.prompt.category,
            "messages": self.messages,
            **last,
            "finish_reason": self.finish_reasons[-1],
            "finish_reasons": self.finish_reasons,
            "sample": self.sample,
            "backend": backend,
            "ids_exact": self.exact,
        }
        if earlier:
            record["earlier"] = earlier
        return record
