"""`distill --backend server`: the job run by OpenAI-compatible servers (vLLM, SGLang, TGI, llama.cpp, transformers
serve)."""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import TYPE_CHECKING, Any

from medusa_train.console import Progress, progress, say
from medusa_train.dataset.backend_server import Reply, ServerPool
from medusa_train.dataset.conversations import Conversation, Message
from medusa_train.dataset.dialogue import Dialogue
from medusa_train.dataset.distill import Job
from medusa_train.dataset.render import RowOptions, render_conversation, render_prompt
from medusa_train.dataset.templates import Unmaskable
from medusa_train.errors import UserError

if TYPE_CHECKING:
    from medusa_train.dataset.job import ServerOptions


def run_server(
    job: Job, dialogues: list[Dialogue], base: Any, resolved: dict[str, Any], options: ServerOptions
) -> None:
    """Answers the dialogues by the servers; each is journaled as soon as its last turn is done."""
    asyncio.run(_run(job, dialogues, base, resolved, options))


async def _run(
    job: Job, dialogues: list[Dialogue], base: Any, resolved: dict[str, Any], options: ServerOptions
) -> None:
    pool = ServerPool(
        options.urls,
        model=options.model,
        api_key=os.environ.get(options.api_key_env),
        concurrency=options.concurrency,
        timeout=options.timeout,
        retries=options.retries,
    )
    mismatched = 0
    async with pool:
        await pool.connect()
        waiting = iter(dialogues)
        with progress("distill", total=len(dialogues), unit="rows") as bar:

            async def worker() -> None:
                nonlocal mismatched
                # One shared iterator: workers take the next dialogue as they get free, and nothing is queued in memory.
                for dialogue in waiting:
                    mismatched += await _answer_all(pool, job, dialogue, base, resolved, bar)

            workers = [asyncio.create_task(worker()) for _ in range(options.concurrency * len(options.urls))]
            try:
                await asyncio.gather(*workers)
            finally:
                for task in workers:
                    task.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
            bar.describe(f"distill ({job.rate_text()})")
    if mismatched:
        say(f"{mismatched} answers: the server's prompt ids are not this chat template's; the server's are kept")


async def _answer_all(
    pool: ServerPool, job: Job, dialogue: Dialogue, base: Any, resolved: dict[str, Any], bar: Progress
) -> int:
    """Answers every turn of one dialogue; returns how often the server's prompt ids were not ours."""
    mismatched = 0
    while not dialogue.done:
        turn = dialogue.turn
        seed = int.from_bytes(hashlib.sha256(f"{dialogue.seed}:{turn}".encode()).digest()[:4], "big") >> 1
        reply = await pool.chat(dialogue.messages, request_body(resolved, seed))
        if reply.refusal is not None:
            # The server will never answer this one (too long for it, say): counted, not repeated for ever.
            job.counts.skipped[f"refused by the server: {reply.refusal[:60]}"] += 1
            dialogue.give_up()
            break
        mismatched += _take(dialogue, reply, base, resolved)
        job.tokens(reply.token_count)
        bar.describe(f"distill ({job.rate_text()})")
    if dialogue.parts:
        job.keep(dialogue, "server")
    bar.advance()
    return mismatched


def request_body(resolved: dict[str, Any], seed: int) -> dict[str, Any]:
    """The decoding part of a chat completion request, neutral values too: vLLM and SGLang fill what is absent from the
    model's generation_config (-1 is their top_k of all tokens)."""
    return {
        "max_tokens": resolved["max_new_tokens"],
        "temperature": resolved["temperature"],
        "seed": seed,
        "top_p": resolved["top_p"],
        "top_k": resolved["top_k"] or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def _take(dialogue: Dialogue, reply: Reply, base: Any, resolved: dict[str, Any]) -> bool:
    """Gives the dialogue its answer: the server's ids where it sent them, else the text tokenized again."""
    prompt_ids = render_prompt(base, dialogue.messages)
    ids = None if reply.token_ids is None else with_stop_token(reply, resolved["stop_token_ids"])
    if ids is not None:
        theirs = list(reply.prompt_token_ids) if reply.prompt_token_ids is not None else prompt_ids
        dialogue.answer(reply.text, theirs, ids, reply.finish_reason, exact=True)
        return theirs != prompt_ids
    ids = retokenized(base, dialogue.messages, reply.text, reply.finish_reason, len(prompt_ids))
    dialogue.answer(reply.text, prompt_ids, ids, reply.finish_reason, exact=False)
    return False


def with_stop_token(reply: Reply, stop_ids: list[int]) -> list[int] | None:
    """The server's ids with the stop token that ended them, which some servers cut off with its text.

    None where it is missing and could be any of several: such an answer is known by its text alone.
    """
    ids = list(reply.token_ids)
    if reply.finish_reason != "stop" or ids[-1] in stop_ids:
        return ids
    return [*ids, *stop_ids] if len(stop_ids) == 1 else None


def retokenized(
    base: Any, messages: list[dict[str, str]], text: str, finish_reason: str, prompt_length: int
) -> list[int]:
    """Ids of an answer known by its text alone: as the template renders it, without a fake end where it was cut.

    Raises:
        UserError: the template cannot render the answer.
    """
    turns = tuple(
        Message(turn["role"], turn["content"]) for turn in [*messages, {"role": "assistant", "content": text}]
    )
    options = RowOptions(one_row_per_turn=True, supervise_terminator=finish_reason == "stop")
    try:
        row = render_conversation(base, Conversation(turns, "server"), options)[-1]
    except Unmaskable as error:
        raise UserError(f"an answer cannot be rendered: {error.reason}", where=f"template of {base.name}") from error
    end = int(row.loss_mask.nonzero()[0][-1]) + 1 if row.loss_mask.any() else prompt_length
    return row.input_ids[prompt_length:end].tolist()
