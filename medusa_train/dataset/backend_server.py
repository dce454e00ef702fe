"""Asking several OpenAI-compatible servers at once, and losing nothing when they fail.

Requests go to the server with the fewest under way. 408, 409, 425, 429, 5xx, time-outs, broken connections and half
answers are tried again after a growing pause with jitter (or as long as `Retry-After` says). A server that fails
several times in a row is set aside for a while and asked again later; when all are aside and stay so, the run stops,
and what is answered is journaled.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_train.console import say
from medusa_train.dataset.server_styles import Dialect, answer_ids
from medusa_train.errors import UserError

RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529}
FAILURES_UNTIL_ASIDE, HOPELESS_AFTER = 5, 20
FIRST_PAUSE_S, LONGEST_PAUSE_S, ASIDE_S = 0.5, 30.0, 30.0


@dataclass(frozen=True)
class Reply:
    """A server's answer: `token_ids` and `prompt_token_ids` where it sent them; `refusal` where it never will
    answer."""

    text: str = ""
    finish_reason: str = "stop"
    token_ids: Sequence[int] | None = None
    prompt_token_ids: Sequence[int] | None = None
    token_count: int = 0
    refusal: str | None = None


class Retry(Exception):
    """This try failed in a way that another may not."""

    def __init__(self, reason: str, pause: float | None = None):
        super().__init__(reason)
        self.pause = pause


@dataclass
class _Server:
    url: str
    model: str | None = None
    under_way: int = 0
    failures: int = 0
    aside_until: float = 0.0
    answered: int = 0
    dialect: Dialect = field(default_factory=Dialect)
    last_reason: str = ""
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))


class ServerPool:
    """Servers that share the requests. An async context manager.

    Args:
        urls: base addresses (``http://host:8000/v1``; a missing ``/v1`` is added).
        concurrency: requests under way per server.
        timeout: seconds for one answer.
        retries: tries after the first before the run stops.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model: str | None = None,
        api_key: str | None = None,
        concurrency: int = 32,
        timeout: float = 300.0,
        retries: int = 8,
        first_pause: float = FIRST_PAUSE_S,
        aside: float = ASIDE_S,
    ):
        import httpx

        if not urls:
            raise UserError("no server is named", fix="give --url http://host:8000/v1")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise UserError("not an address of a server", where=url, allowed="http://... or https://...")
        self.servers = [
            _Server(_normal(url), model, gate=asyncio.Semaphore(concurrency)) for url in dict.fromkeys(urls)
        ]
        self.retries, self.first_pause, self.aside = retries, first_pause, aside
        self.tries = self.refused = 0
        self._random = random.Random()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)),
            limits=httpx.Limits(max_connections=None),
        )
        self._timeout = timeout

    async def __aenter__(self) -> ServerPool:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.aclose()

    async def connect(self) -> None:
        """Asks each server for its models. Servers that do not answer are set aside.

        Raises:
            UserError: none answers, or none has the model asked for.
        """
        import httpx

        problems = []
        for server in self.servers:
            try:
                reply = await self._client.get(f"{server.url}/models", timeout=min(self._timeout, 10.0))
                if reply.status_code in (401, 403):
                    raise UserError(f"the server refuses the API key (HTTP {reply.status_code})", where=server.url)
                models = reply.json().get("data", []) if reply.is_success else []
                names = [str(item["id"]) for item in models]
                server.dialect = Dialect(str(models[0].get("owned_by", ""))) if models else Dialect()
            except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
                problems.append(f"{server.url}: {type(error).__name__} {str(error)[:80]}")
                self._put_aside(server, "does not answer")
                continue
            if server.model is None:
                server.model = names[0] if names else "default"
            elif names and server.model not in names:
                raise UserError(f"no model {server.model!r}", where=server.url, allowed=", ".join(names))
        if len(problems) == len(self.servers):
            raise UserError("no server answers: " + "; ".join(problems), fix="check --url and that the server runs")

    async def chat(self, messages: list[dict[str, str]], body: dict[str, Any]) -> Reply:
        """One answer, tried again until it is whole.

        Raises:
            UserError: the tries are used up.
        """
        reason = ""
        for number in range(self.retries + 1):
            server = await self._pick()
            async with server.gate:
                server.under_way += 1
                self.tries += 1
                try:
                    reply = await self._once(server, messages, body)
                except Retry as failure:
                    reason, pause = f"{server.url}: {failure}", failure.pause
                    server.failures += 1
                    server.last_reason = str(failure)
                    if server.failures >= FAILURES_UNTIL_ASIDE and len(self.servers) > 1:
                        self._put_aside(server, str(failure))
                else:
                    server.failures = 0
                    self._count(server, reply)
                    return reply
                finally:
                    server.under_way -= 1
            if number < self.retries:
                grown = min(LONGEST_PAUSE_S, self.first_pause * 2**number)
                await asyncio.sleep(pause if pause is not None else grown * self._random.uniform(0.5, 1.5))
        raise UserError(
            f"no answer after {self.retries + 1} tries; the last: {reason}",
            fix="mend the server and run the same command again: what is answered is kept",
        )

    def _count(self, server: _Server, reply: Reply) -> None:
        """Notes an answer or a refusal; a server that only refuses is a mistake in the settings, not in the prompts."""
        server.answered += reply.refusal is None
        self.refused += reply.refusal is not None
        if self.refused >= HOPELESS_AFTER and not any(one.answered for one in self.servers):
            raise UserError(f"every request is refused: {reply.refusal}", where=server.url, fix="check the settings")

    async def _pick(self) -> _Server:
        """The server with the fewest requests under way, of those not aside; waits where all are."""
        while True:
            now = time.monotonic()
            ready = [server for server in self.servers if server.aside_until <= now]
            if ready:
                return min(ready, key=lambda server: (server.under_way, server.answered))
            await asyncio.sleep(max(0.01, min(server.aside_until for server in self.servers) - now))

    def _put_aside(self, server: _Server, reason: str) -> None:
        if server.aside_until <= time.monotonic():
            say(f"{server.url} is set aside for {self.aside:.0f} s: {reason}")
        server.aside_until, server.failures = time.monotonic() + self.aside, 0

    async def _once(self, server: _Server, messages: list[dict[str, str]], body: dict[str, Any]) -> Reply:
        """One try; a request that is refused is sent again without what the server may not know."""
        fixed = {"model": server.model or "default", "messages": messages, "stream": False}
        dialect = server.dialect
        while True:
            response = await self._post(server, {**fixed, **dialect.fields(body)})
            if response.status_code not in (400, 422):
                break
            simpler = dialect.simpler(body, response.text)
            if simpler is None:
                break
            dialect = simpler
        if response.status_code >= 400:
            return Reply(refusal=f"HTTP {response.status_code}: {_message(response)}")
        reply = _parsed(response)
        if dialect.omitted - server.dialect.omitted >= {"seed"}:
            say(f"{server.url} takes no seed: what it samples cannot be made again")
        # What worked is what it is sent from now on; a request that was refused in every form says nothing.
        server.dialect = dialect.learn(response.json())
        return reply

    async def _post(self, server: _Server, request: dict[str, Any]) -> Any:
        """The response to one request, where it is an answer or a refusal of this very request."""
        import httpx

        try:
            # httpx's time-outs are per read; a server that drips bytes must not hold a place for ever.
            response = await asyncio.wait_for(
                self._client.post(f"{server.url}/chat/completions", json=request), self._timeout
            )
        except (httpx.TimeoutException, asyncio.TimeoutError) as error:
            raise Retry(f"no answer within {self._timeout:g} s") from error
        except httpx.HTTPError as error:
            raise Retry(f"{type(error).__name__}: {str(error)[:80]}") from error
        if response.status_code in RETRIED:
            raise Retry(f"HTTP {response.status_code}", _retry_after(response.headers.get("retry-after")))
        if response.status_code in (401, 403, 404, 405):
            raise UserError(
                f"HTTP {response.status_code}: {_message(response)}",
                where=server.url,
                fix="check --url, --server-model and the API key",
            )
        return response


def _parsed(response: Any) -> Reply:
    """The answer in a response body; half an answer is a failed try."""
    try:
        data = response.json()
        choice = data["choices"][0]
        text = choice["message"]["content"]
        finish = choice["finish_reason"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise Retry(f"half an answer: {type(error).__name__}") from error
    if finish in ("tool_calls", "function_call", "content_filter"):
        return Reply(refusal=f"finish_reason {finish}")  # it would be so again
    if text is None and finish == "length":
        return Reply(refusal="cut by length before its text began")  # in mid-thought; it would be so again
    if not isinstance(text, str) or finish not in ("stop", "length", "eos", "eos_token", "stop_sequence"):
        raise Retry(f"half an answer: finish_reason {finish!r}")
    ids, prompt_ids = answer_ids(data)
    usage = data.get("usage") or {}
    count = usage.get("completion_tokens") or (len(ids) if ids else max(1, len(text) // 4))
    return Reply(text, "length" if finish == "length" else "stop", ids, prompt_ids, int(count))


def _retry_after(value: str | None) -> float | None:
    try:
        return None if value is None else min(LONGEST_PAUSE_S, max(0.0, float(value)))
    except ValueError:
        return None


def _message(response: Any) -> str:
    try:
        error = response.json()
        error = error.get("error", error)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:200]
    except (ValueError, AttributeError):
        return response.text[:200]


def _normal(url: str) -> str:
    url = url.rstrip("/")
    return url if url.rsplit("/", 1)[-1] in ("v1", "v2", "v3", "v4") else f"{url}/v1"
