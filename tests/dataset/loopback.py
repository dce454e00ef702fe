"""A small OpenAI-compatible server on loopback that fails on purpose: 429, 500, time-outs, half answers, slow
answers."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ("the", "sky", "is", "blue", "because", "of", "light", "and", "two", "answers", "please", "three")


def answer_to(messages: list[dict[str, str]]) -> str:
    """A text that depends on the whole conversation, so that a lost or swapped turn shows."""
    digest = hashlib.sha256(json.dumps(messages).encode()).digest()
    return " ".join(WORDS[byte % len(WORDS)] for byte in digest[: 3 + digest[0] % 9])


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # of the default 5, a burst of connections loses some to a second's wait


class LoopbackServer:
    """Speaks /v1/models and /v1/chat/completions.

    Args:
        fault: called with the number of the request; names what goes wrong, or None.
        tokenizer: with it, token ids are returned where asked for (`return_token_ids`).
        style: the server it speaks like: "vllm", "sglang", "llamacpp", "tgi", or any other.
        strict: answers 400 to request fields that are not OpenAI's.
        refuse: names what is wrong with a request, or None: (status, error body).
        trim_stop: leaves the stop token out of the ids.
        delay: seconds that a "slow" answer takes, and a "timeout" many times over.
    """

    def __init__(
        self,
        fault: Callable[[int], str | None] = lambda number: None,
        *,
        tokenizer: Any = None,
        render: Callable[[list[dict[str, str]]], list[int]] | None = None,
        style: str = "vllm",
        strict: bool = False,
        trim_stop: bool = False,
        refuse: Callable[[dict], tuple[int, dict] | None] = lambda request: None,
        delay: float = 0.3,
        cut_after: int | None = None,
    ):
        self.fault, self.tokenizer, self.render, self.strict, self.delay = fault, tokenizer, render, strict, delay
        self.cut_after, self.style, self.refuse, self.trim_stop = cut_after, style, refuse, trim_stop
        self.seen: Counter = Counter()
        self.answered: Counter = Counter()
        self.requests: list[dict] = []
        self.most_at_once = self._now = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                outer.send(self, 200, {"object": "list", "data": [{"id": "tiny", "owned_by": outer.style}]})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with outer._lock:
                    number = sum(outer.seen.values())
                    outer._now += 1
                    outer.most_at_once = max(outer.most_at_once, outer._now)
                try:
                    outer.handle(self, number, json.loads(body))
                except (BrokenPipeError, ConnectionResetError):
                    pass
                finally:
                    with outer._lock:
                        outer._now -= 1

        self.http = _Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self._thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> LoopbackServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    @staticmethod
    def send(
        handler: BaseHTTPRequestHandler, status: int, data: dict, headers: dict | None = None, cut: bool = False
    ) -> None:
        body = json.dumps(data).encode()
        handler.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(body), **(headers or {})}.items():
            handler.send_header(name, str(value))
        handler.end_headers()
        handler.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            handler.close_connection = True

    def handle(self, handler: BaseHTTPRequestHandler, number: int, request: dict) -> None:
        fault = self.fault(number)
        with self._lock:
            self.seen[fault or "none"] += 1
            self.requests.append(request)
        extra = set(request) - {"model", "messages", "stream", "max_tokens", "temperature", "top_p", "seed"}
        if self.strict and extra:
            self.send(handler, 400, {"error": {"message": f"unknown fields {sorted(extra)}"}})
            return
        refusal = self.refuse(request)
        if refusal is not None:
            self.send(handler, *refusal)
            return
        if fault in ("429", "500", "503"):
            self.send(handler, int(fault), {"error": "later"}, {"Retry-After": "0.01"} if fault == "429" else None)
            return
        if fault == "refuse":
            self.send(handler, 400, {"error": {"message": "the prompt is too long for this model"}})
            return
        if fault == "drop":
            handler.close_connection = True
            handler.connection.close()
            return
        if fault in ("slow", "timeout"):
            time.sleep(self.delay * (20 if fault == "timeout" else 1))
        data = self.completion(request)
        if fault == "null":
            data["choices"][0]["message"]["content"] = None
        self.send(handler, 200, data, cut=fault == "truncated")
        with self._lock:
            self.answered[json.dumps(request["messages"])] += fault not in ("truncated", "null", "timeout")

    def completion(self, request: dict) -> dict:
        text, finish = answer_to(request["messages"]), "stop"
        if self.cut_after is not None:
            text, finish = " ".join(text.split()[: self.cut_after]), "length"
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
        data = {"id": "x", "object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": 5}}
        if self.tokenizer is not None:
            stopped = finish == "stop" and not self.trim_stop
            ids = self.ids_of(text) + ([self.tokenizer.eos_token_id] if stopped else [])
            self.add_ids(request, data, choice, ids)
        return data

    def add_ids(self, request: dict, data: dict, choice: dict, ids: list[int]) -> None:
        """The ids where a server of this style puts them, if it was asked the way it wants to be."""
        prompt = self.render(request["messages"])
        if self.style == "vllm" and request.get("return_token_ids"):
            choice["token_ids"], data["prompt_token_ids"] = ids, prompt
        elif self.style == "sglang":
            if request.get("return_meta_info") and request.get("logprobs"):
                choice["meta_info"] = {"output_token_logprobs": [[-0.5, token, "x"] for token in ids]}
            if request.get("return_prompt_token_ids"):
                choice["prompt_token_ids"] = prompt
        elif self.style == "llamacpp":  # started with --verbose
            data["__verbose"] = {"content": choice["message"]["content"], "prompt": "text", "stop": True}
            data["__verbose"]["tokens"] = ids if request.get("return_tokens") else []
        elif self.style == "tgi":
            choice["finish_reason"] = {"stop": "eos_token"}.get(choice["finish_reason"], choice["finish_reason"])

    def ids_of(self, text: str) -> list[int]:
        """Ids that no tokenizer would give for the text, one per character: only the server can know them."""
        return [self.tokenizer(character)["input_ids"][0] for character in text]
