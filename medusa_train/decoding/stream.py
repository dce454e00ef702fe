"""Token ids to text, piece by piece, without ever showing half a character.

A tokenizer's text of a token depends on its neighbours, so text is decoded from a little before the new token and the
known part is cut off.
"""

from __future__ import annotations

from typing import Any

UNFINISHED = "\ufffd"


class TextStream:
    """Turns a growing list of ids into pieces of text; the pieces joined are the decoded whole."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # decoding begins here: one finished piece back
        self._known = 0  # ids before here have been shown

    def push(self, token: int) -> str:
        """The text that became certain with `token`; empty while a character is unfinished."""
        self._ids.append(token)
        before, text = self._decode(self._start, self._known), self._decode(self._start, len(self._ids))
        if text.endswith(UNFINISHED):
            return ""
        self._start, self._known = self._known, len(self._ids)
        return text[len(before) :]

    def flush(self) -> str:
        """What is left at the end, unfinished characters as they are."""
        before, text = self._decode(self._start, self._known), self._decode(self._start, len(self._ids))
        self._start = self._known = len(self._ids)
        return text[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(
            self._ids[start:end], skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
