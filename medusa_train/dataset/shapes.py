"""The shapes in which chat data comes, and their translation into one: a list of role and text."""

from __future__ import annotations

from typing import Any

from medusa_train.errors import UserError

ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "function_call": "tool",
}
"""Role names seen in the wild and what they mean."""

KNOWN = {
    "messages": "messages: [{role, content}]",
    "sharegpt": "conversations: [{from, value}]",
    "turns": "turns: [user text, user text]",
    "alpaca": "instruction, input, output",
    "prompt": "prompt, response",
}


class Dropped(Exception):
    """A record of the right shape that cannot be used; `reason` is the name it is counted under."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def detect(record: Any, where: str) -> str:
    """The name of the record's shape (a key of `KNOWN`)."""
    if isinstance(record, dict):
        first = {name: record.get(name) for name in ("messages", "conversations", "conversation", "turns")}
        if _list_of_dicts(first["messages"]):
            return "messages"
        for name in ("conversations", "conversation"):
            if _list_of_dicts(first[name]):
                return "messages" if first[name] and "role" in first[name][0] else "sharegpt"
        if isinstance(first["turns"], list) and first["turns"]:
            return "turns"
        if isinstance(record.get("instruction"), str):
            return "alpaca"
        if "prompt" in record and isinstance(record["prompt"], str | list):
            return "prompt"
    raise wrong_shape(record, where)


def _list_of_dicts(value: Any) -> bool:
    return isinstance(value, list) and (not value or isinstance(value[0], dict))


def wrong_shape(record: Any, where: str, expected: str | None = None) -> UserError:
    """The error for a record that fits no shape, or not the one of its file."""
    seen = f"keys {', '.join(map(str, record))}" if isinstance(record, dict) else f"a {type(record).__name__}"
    known = "; ".join(KNOWN.values())
    if expected is None:
        return UserError(f"no known shape of conversation: {seen}", where=where, allowed=known)
    return UserError(
        f"not of the shape its file began with ({KNOWN[expected]}): {seen}",
        where=where,
        allowed=KNOWN[expected],
        fix="put records of one shape into one file",
    )


def turns_of(record: Any, shape: str, where: str) -> list[tuple[str, str]]:
    """(role, text) of every turn; roles are user, assistant, system.

    Raises:
        UserError: the record is not of `shape`.
        Dropped: it is, but holds what has no text form (tool calls, images, unknown roles).
    """
    try:
        if shape == "alpaca":
            turns = _alpaca(record)
        elif shape == "prompt":
            turns = _prompt(record)
        elif shape == "turns":
            turns = [("user", _text(turn)) for turn in record["turns"]]
        else:
            name = next((key for key in ("messages", "conversations", "conversation") if key in record), "messages")
            turns = [_turn(turn) for turn in record[name]]
        if not all(isinstance(text, str) for _, text in turns):
            raise TypeError("a text that is none")
    except (KeyError, TypeError, AttributeError) as error:
        raise wrong_shape(record, where, expected=shape) from error
    system = record.get("system")
    if isinstance(system, str) and system and not any(role == "system" for role, _ in turns):
        turns.insert(0, ("system", system))
    return turns


def _turn(turn: dict) -> tuple[str, str]:
    name = turn["role"] if "role" in turn else turn["from"]
    role = ROLES.get(str(name).strip().lower())
    if role is None:
        raise Dropped(f"unknown role {str(name)[:20]!r}")
    if role == "tool" or turn.get("tool_calls") or turn.get("function_call"):
        raise Dropped("tool turn")
    content = turn["content"] if "content" in turn else turn["value"]
    text = _text(content)
    reasoning = turn.get("reasoning_content")
    if role == "assistant" and isinstance(reasoning, str) and reasoning:
        text = f"<think>\n{reasoning}\n</think>\n\n{text}"
    return role, text


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
        elif part.get("type", "text") in ("text", "input_text", "output_text"):
            parts.append(part["text"])
        else:
            raise Dropped(f"content part of type {str(part.get('type'))[:20]!r}")
    return "".join(parts)


def _alpaca(record: dict) -> list[tuple[str, str]]:
    question = record["instruction"]
    extra = record.get("input") or ""
    turns = [("user", f"{question}\n\n{extra}" if extra.strip() else question)]
    answer = record.get("output", record.get("response"))
    return turns if answer is None else [*turns, ("assistant", _text(answer))]


def _prompt(record: dict) -> list[tuple[str, str]]:
    prompt = record["prompt"]
    turns = [("user", prompt)] if isinstance(prompt, str) else [_turn(turn) for turn in prompt]
    answer = next((record[name] for name in ("response", "completion", "answer", "chosen") if name in record), None)
    if answer is None:
        return turns
    if isinstance(answer, list):
        return [*turns, *(_turn(turn) for turn in answer)]
    return [*turns, ("assistant", _text(answer))]
