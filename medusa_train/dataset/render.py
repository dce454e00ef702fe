"""Conversations to token ids with a mask over exactly the assistant's tokens and the tokens that end its turns.

Training sees the ids that generation would have seen: a prompt inside a row has the ids of `render_prompt`, always.
Where tokenizing the whole conversation would merge across such a border, or the template rewrites earlier turns once
the conversation grows, the conversation becomes one row per assistant turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from medusa_train.dataset.conversations import Conversation
from medusa_train.dataset.templates import (
    WAY_OUT,
    Answer,
    Unmaskable,
    answers_of,
    has_generation_tag,
    render_text,
)
from medusa_train.errors import UserError

# Ordinary text put before an answer that must be tokenized as a continuation; its own tokens are then cut off.
_ANCHORS = ("\n", ":", " ", "]", "a")


@dataclass(frozen=True)
class RowOptions:
    """How conversations become rows.

    Attributes:
        max_length: longest row in tokens; longer ones are cut, and counted.
        supervise_terminator: whether the token that ends an assistant turn is supervised.
        one_row_per_turn: a row for each assistant turn, each with its whole context.
        max_drop_fraction: the share of conversations that may be dropped before reading fails.
    """

    max_length: int = 2048
    supervise_terminator: bool = True
    one_row_per_turn: bool = False
    max_drop_fraction: float = 0.05


@dataclass(frozen=True, eq=False)
class Rendered:
    """One row before it is cut and named: ``input_ids int32[T]``, ``loss_mask uint8[T]``."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


def encode(base: Any, text: str) -> list[int]:
    """Token ids of template text. The template writes its own special tokens, so the tokenizer adds none."""
    return base.tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"]


def render_prompt(base: Any, messages: list[dict[str, str]] | Conversation) -> list[int]:
    """Token ids that the model sees before it answers `messages`.

    Raises:
        UserError: the template refuses the conversation.
    """
    dicts = messages.as_dicts() if isinstance(messages, Conversation) else [_as_dict(message) for message in messages]
    try:
        return encode(base, render_text(base, dicts, add_generation_prompt=True))
    except Unmaskable as error:
        where = messages.source if isinstance(messages, Conversation) else f"template of {base.name}"
        raise UserError(error.reason, where=where, fix=WAY_OUT) from error


def _as_dict(message: Any) -> dict[str, str]:
    return message if isinstance(message, dict) else message.as_dict()


def render_conversation(base: Any, conversation: Conversation, options: RowOptions | None = None) -> list[Rendered]:
    """The rows of one conversation, uncut: one, or one per assistant turn where one cannot be exact.

    Args:
        base: anything with `.tokenizer`, `.chat_template` and `.name` (a BaseTokenizer or Base).

    Raises:
        Unmaskable: no exact mask exists for it under this template.
    """
    options = options or RowOptions()
    messages = conversation.as_dicts()
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()  # a question nobody answers supervises nothing
    if not messages:
        raise Unmaskable("no assistant turn")
    if has_generation_tag(base.chat_template) and not options.one_row_per_turn:
        return [_by_generation_tag(base, messages, options)]
    answers = answers_of(base, messages, raw_answers=options.one_row_per_turn)
    if not options.one_row_per_turn:
        row = _one_row(base, messages, answers, options)
        if row is not None:
            return [row]
    return [_row_of_turn(base, answer, options) for answer in answers]


def _one_row(base: Any, messages: list[dict[str, str]], answers: list[Answer], options: RowOptions) -> Rendered | None:
    """The whole conversation as one row, or None where some prompt inside it would have other ids than alone."""
    text = answers[-1].prompt + answers[-1].text + answers[-1].terminator
    ids = encode(base, text)
    mask = np.zeros(len(ids), dtype=np.uint8)
    for answer in answers:
        if not text.startswith(answer.prompt + answer.text + answer.terminator):
            return None
        stop = answer.terminator if options.supervise_terminator else ""
        begin = _border(base, ids, answer.prompt)
        end = _border(base, ids, answer.prompt + answer.text + stop)
        if begin is None or end is None:
            return None
        mask[begin:end] = 1
    return Rendered(np.asarray(ids, dtype=np.int32), mask)


def _border(base: Any, ids: list[int], beginning: str) -> int | None:
    """How many of `ids` are exactly the tokens of `beginning`; None where a token straddles its end."""
    part = encode(base, beginning)
    return len(part) if ids[: len(part)] == part else None


def _row_of_turn(base: Any, answer: Answer, options: RowOptions) -> Rendered:
    prompt_ids = encode(base, answer.prompt)
    answer_ids = _continue(base, prompt_ids, answer.prompt, answer.text + answer.terminator)
    supervised = len(answer_ids)
    if not options.supervise_terminator:
        supervised = len(_continue(base, prompt_ids, answer.prompt, answer.text))
        if answer_ids[:supervised] != _continue(base, prompt_ids, answer.prompt, answer.text):
            raise Unmaskable("the end of the turn is merged into the answer's last token")
    mask = [0] * len(prompt_ids) + [1] * supervised + [0] * (len(answer_ids) - supervised)
    return Rendered(np.asarray(prompt_ids + answer_ids, dtype=np.int32), np.asarray(mask, dtype=np.uint8))


def _continue(base: Any, prompt_ids: list[int], prompt: str, text: str) -> list[int]:
    """Token ids of `text` as it goes on after `prompt_ids`, whatever merges across the border would have happened."""
    if not text:
        return []
    whole = encode(base, prompt + text)
    if whole[: len(prompt_ids)] == prompt_ids:
        return whole[len(prompt_ids) :]
    for anchor in _ANCHORS:
        before, both = encode(base, anchor), encode(base, anchor + text)
        if before and both[: len(before)] == before:
            return both[len(before) :]
    raise Unmaskable("the answer cannot be tokenized on its own")


def _by_generation_tag(base: Any, messages: list[dict[str, str]], options: RowOptions) -> Rendered:
    """Ids and mask as transformers reads them off ``{% generation %}``; the stop token after each part joins it."""
    import jinja2

    try:
        encoded = base.tokenizer.apply_chat_template(
            messages,
            chat_template=base.chat_template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except (jinja2.TemplateError, TypeError, ValueError, IndexError, KeyError) as error:
        raise Unmaskable(f"template refuses: {str(error)[:60]}") from error
    ids = np.asarray(encoded["input_ids"], dtype=np.int32)
    mask = np.asarray(encoded["assistant_masks"], dtype=np.uint8)
    stops = np.isin(ids, np.asarray(sorted(stop_token_ids(base)), dtype=np.int32))
    if options.supervise_terminator:
        after = np.zeros_like(mask)
        after[1:] = mask[:-1]
        mask = mask | (after & stops & (1 - mask))
    else:
        ending = mask.astype(bool) & stops & ~np.append(mask[1:], 0).astype(bool)
        mask = np.where(ending, 0, mask).astype(np.uint8)
    return Rendered(ids, mask)


def stop_token_ids(base: Any) -> set[int]:
    """Ids after which generation stops: generation_config's eos (one or several) and the tokenizer's own."""
    found: set[int] = set()
    config = getattr(getattr(base, "model", None), "generation_config", None)
    eos = getattr(config, "eos_token_id", None)
    if eos is None:
        eos = _generation_config_eos(getattr(base, "folder", None))
    if eos is not None:
        found |= set(eos) if isinstance(eos, list | tuple) else {eos}
    if base.tokenizer.eos_token_id is not None:
        found.add(base.tokenizer.eos_token_id)
    return {int(token) for token in found}


def _generation_config_eos(folder: Any) -> Any:
    import json
    from pathlib import Path

    path = Path(folder) / "generation_config.json" if folder else None
    if path is None or not path.is_file():
        return None
    return json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
