"""Chat templates as text: what a conversation looks like, and where in it each answer stands.

Nothing here searches for an answer's text. An answer begins where the rendering of everything before it ends
(`add_generation_prompt`), and ends where the rendering of a stand-in answer says that the template goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from medusa_train.errors import UserError

# Stands for an answer or a question while the template's own text around it is read. Private-use characters: no
# template and no conversation holds them, no filter of a template (trim, lower) changes them.
STAND_IN = "\ue000\ue123\ue001"

WAY_OUT = "give another template with --chat-template FILE, or render one row per turn (one_row_per_turn: true)"


class Unmaskable(Exception):
    """This conversation cannot be rendered or masked; `reason` is the name it is counted under."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Answer:
    """One assistant turn as text: it follows `prompt`; `text` is the answer as rendered, `terminator` what ends the
    turn (a stop token's text, mostly), `message_index` its place in the conversation."""

    message_index: int
    prompt: str
    text: str
    terminator: str

    @property
    def end(self) -> int:
        """Characters from the conversation's beginning to the end of the turn."""
        return len(self.prompt) + len(self.text) + len(self.terminator)


def render_text(base: Any, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
    """The template's text for `messages`.

    Raises:
        Unmaskable: the template itself refuses the conversation (a system turn it does not know, say).
    """
    import jinja2

    try:
        return base.tokenizer.apply_chat_template(
            messages, chat_template=base.chat_template, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"the chat template is broken: {error}", where=f"template of {base.name}, line {error.lineno}"
        ) from error
    except (jinja2.TemplateError, TypeError, ValueError, IndexError, KeyError) as error:
        raise Unmaskable(f"template refuses: {str(error)[:60]}") from error


def stop_strings(base: Any) -> list[str]:
    """Texts of the tokens that may end a turn: every special token that the tokenizer knows by name or by addition."""
    tokenizer = base.tokenizer
    names = {str(token) for token in tokenizer.all_special_tokens}
    names |= {token.content for token in tokenizer.added_tokens_decoder.values()}
    return sorted((name for name in names if name and name.strip()), key=len, reverse=True)


def split_terminator(suffix: str, stops: list[str]) -> str:
    """The part of `suffix` (the template's text after an answer) that ends the turn: up to and including the first stop
    token's text; where there is none (``\\n\\nHuman:`` templates), all of it."""
    best: tuple[int, int] | None = None
    for stop in stops:
        at = suffix.find(stop)
        if at >= 0 and (best is None or (at, -len(stop)) < (best[0], -best[1])):
            best = (at, len(stop))
    return suffix if best is None else suffix[: best[0] + best[1]]


def answers_of(base: Any, messages: list[dict[str, str]], *, raw_answers: bool = False) -> list[Answer]:
    """Every assistant turn as it is rendered while it is the last one.

    Args:
        raw_answers: where the rendered turn does not continue the generation prompt (a template that strips reasoning
        even
            from the last answer), take prompt + the answer's own text: what generation produced.

    Raises:
        Unmaskable: an answer does not stand after the generation prompt, and `raw_answers` is off.
    """
    stops, found = stop_strings(base), []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = messages[:index]
        prompt = render_text(base, before, add_generation_prompt=True)
        whole = render_text(base, messages[: index + 1], add_generation_prompt=False)
        sample = render_text(base, [*before, {"role": "assistant", "content": STAND_IN}], add_generation_prompt=False)
        _, seen, suffix = sample.partition(STAND_IN)
        if not seen:
            raise Unmaskable("template leaves out assistant turns")
        terminator = split_terminator(suffix, stops)
        if whole.startswith(prompt) and whole.endswith(suffix) and len(whole) >= len(prompt) + len(suffix):
            text = whole[len(prompt) : len(whole) - len(suffix)]
        elif raw_answers:
            text = message["content"]
        else:
            raise Unmaskable("template changes the answer's beginning")
        found.append(Answer(index, prompt, text, terminator))
    return found


def user_header(base: Any, system: str | None) -> tuple[str, str]:
    """What stands before a first user turn, and the text that ends such a turn (for making up user turns)."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": STAND_IN})
    try:
        text = render_text(base, messages, add_generation_prompt=True)
    except Unmaskable as error:
        raise UserError(f"no user turn can be made up: {error.reason}", where=f"template of {base.name}") from error
    header, seen, suffix = text.partition(STAND_IN)
    if not seen:
        raise UserError("the chat template leaves out the user's text", where=f"template of {base.name}", fix=WAY_OUT)
    ending = split_terminator(suffix, stop_strings(base))
    return header, ending if ending.strip() else suffix


def has_generation_tag(template: str) -> bool:
    """Whether the template marks the assistant's part itself (``{% generation %}``)."""
    import re

    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
