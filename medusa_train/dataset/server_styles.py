"""How OpenAI-compatible servers differ: how each is asked for token ids, where it puts them, what it does not take.

vLLM, SGLang and llama.cpp name themselves in ``/v1/models`` (``owned_by``). vLLM returns ids for ``return_token_ids``;
SGLang (0.5.13 and later) beside the log-probs of ``return_meta_info``; llama.cpp for ``return_tokens`` where it runs
with ``--verbose``. TGI returns none in chat completions and passes over fields that it does not know; OpenAI's own
server, transformers serve and others refuse them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

VLLM, SGLANG, LLAMA_CPP = "vllm", "sglang", "llamacpp"
ASKS: dict[str, tuple[str, ...]] = {
    VLLM: ("return_token_ids",),
    # Without logprobs there is no meta_info to read ids from.
    SGLANG: ("return_token_ids", "return_meta_info", "return_prompt_token_ids", "logprobs"),
    LLAMA_CPP: ("return_tokens",),
}
ASKS_OF_OTHERS = ("return_token_ids",)
# Values that change nothing: a server that does not know the field may go without.
NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Dialect:
    """What a server is sent.

    Attributes:
        owner: who the server says it is.
        omitted: fields that it has refused.
        new_length_field: whether the length limit is called ``max_completion_tokens`` (OpenAI's newer models).
    """

    owner: str = ""
    omitted: frozenset[str] = frozenset()
    new_length_field: bool = False

    def asks(self) -> list[str]:
        """Fields that ask for token ids."""
        return [name for name in ASKS.get(self.owner, ASKS_OF_OTHERS) if name not in self.omitted]

    def fields(self, body: dict[str, Any]) -> dict[str, Any]:
        """The request's fields: `body` and what asks for ids, less what is refused."""
        fields = {name: value for name, value in body.items() if name not in self.omitted}
        if self.new_length_field:
            fields["max_completion_tokens"] = fields.pop("max_tokens")
        return {**fields, **dict.fromkeys(self.asks(), True)}

    def simpler(self, body: dict[str, Any], error: str) -> Dialect | None:
        """What to try after the answer 400 or 422; None where nothing is left that may be given up.

        Given up are the ways of asking for ids, parameters at their neutral value, and ``seed``, which no greedy
        answer needs. A ``top_p`` or ``top_k`` that cuts is not: without it the answers would be other ones.
        """
        if "max_completion_tokens" in error and not self.new_length_field:
            return replace(self, new_length_field=True)
        neutral = [name for name, value in NEUTRAL.items() if body.get(name) == value and name not in self.omitted]
        asks = [*self.asks(), *neutral]
        optional = [*asks, *(["seed"] if "seed" in body and "seed" not in self.omitted else [])]
        named = [name for name in optional if re.search(rf"\b{name}\b", error)]
        if named or asks:
            return replace(self, omitted=self.omitted | set(named or asks))
        return None

    def learn(self, data: dict[str, Any]) -> Dialect:
        """The dialect for further requests: an SGLang that knows no meta_info need not send log-probs either."""
        if self.owner == SGLANG and "logprobs" in self.asks() and answer_ids(data)[0] is None:
            return replace(self, omitted=self.omitted | set(self.asks()))
        return self


def answer_ids(data: dict[str, Any]) -> tuple[list[int] | None, list[int] | None]:
    """(the answer's token ids, the prompt's) of a chat completion, each None where the server did not send them."""
    choice = data["choices"][0]
    places = [choice, choice.get("message") or {}, data.get("__verbose") or {}]
    candidates = [place.get(name) for place in places for name in ("token_ids", "tokens")]
    meta = choice.get("meta_info") or {}
    candidates.append(_ids_of_logprobs(meta.get("output_token_logprobs")))
    ids = next((value for value in candidates if _are_ids(value)), None)
    prompt_ids = next(
        (place["prompt_token_ids"] for place in (data, choice) if _are_ids(place.get("prompt_token_ids"))), None
    )
    return ids, prompt_ids if ids is not None else None


def _ids_of_logprobs(entries: Any) -> list[int] | None:
    """SGLang's (log-prob, token id, text) triples."""
    if not isinstance(entries, list) or not all(isinstance(entry, list) and len(entry) >= 2 for entry in entries):
        return None
    return [entry[1] for entry in entries]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)
