"""The whole of `distill`: prompts are read and the folder is locked before any model loads; then the backend runs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from medusa_train.console import say
from medusa_train.dataset.conversations import Conversation
from medusa_train.dataset.distill import (
    DistillSettings,
    Job,
    base_identity,
    dialogues_of,
    in_shard,
    prompts_from,
    resolve_settings,
)
from medusa_train.errors import UserError


@dataclass(frozen=True)
class LocalOptions:
    """How the model is loaded here and how large its batch is; none of it changes a row's name."""

    dtype: str = "auto"
    device: str | None = None
    quantization: str | None = None
    batch_tokens: int | None = None
    max_rows: int | None = None


@dataclass(frozen=True)
class ServerOptions:
    """Where the servers are and how patiently they are asked."""

    urls: list[str]
    model: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    concurrency: int = 32
    timeout: float = 300.0
    retries: int = 8


@dataclass(frozen=True)
class SynthesizeOptions:
    """How many prompts the model makes up, and how."""

    count: int = 0
    temperature: float = 1.0
    max_tokens: int = 96


def distill(
    *,
    base: str | Any,
    prompts: Sequence[str],
    out: str,
    settings: DistillSettings,
    limit: int | None = None,
    shard: tuple[int, int] = (1, 1),
    chat_template: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    local: LocalOptions | None = None,
    server: ServerOptions | None = None,
    synthesize: SynthesizeOptions | None = None,
) -> Job:
    """Runs a distillation job to its end (or goes on with it); returns it with its counts.

    Args:
        base: name of a base, or one already loaded.

    Raises:
        UserError: bad prompts, a folder of another job or another writer's, no such base, no server that answers.
    """
    started = time.monotonic()
    local, shard, device = _launched(local or LocalOptions(), shard)
    wanted, described = prompts_from(prompts, settings.system)
    wanted = wanted[:limit] if limit is not None else wanted
    with Job(out, shard) as job:
        names = {"revision": revision, "chat_template": chat_template, "trust_remote_code": trust_remote_code}
        loaded = _load(base, names, local, device, server)
        resolved = resolve_settings(settings, loaded)
        if synthesize is not None and synthesize.count:
            # How many are made up may grow; how they are made decides the rows.
            resolved |= {
                "synthesize_temperature": synthesize.temperature,
                "synthesize_max_tokens": synthesize.max_tokens,
            }
        identity = base_identity(loaded, "local" if server is None else "server")
        if server is not None:
            identity["server_model"] = server.model
        job_hash = job.begin(identity, resolved, described, identity["backend"])
        made: list[Conversation] = []
        if synthesize is not None and synthesize.count:
            made, facts = _make_up(loaded, wanted, job, settings, synthesize, local)
            job.write_manifest(synthesized=facts)
        todo = _todo(job, wanted, made, resolved, job_hash, shard)
        if todo and server is None:
            from medusa_train.dataset.run_local import run_local

            run_local(job, todo, loaded, resolved, batch_tokens=local.batch_tokens, max_rows=local.max_rows)
        elif todo:
            from medusa_train.dataset.run_server import run_server

            run_server(job, todo, loaded, resolved, server)
        job.finish(started)
        return job


def _todo(
    job: Job,
    prompts: list[Conversation],
    made: list[Conversation],
    resolved: dict[str, Any],
    job_hash: str,
    shard: tuple[int, int],
) -> list:
    # A made-up prompt belongs to the shard that made it up; all others go by their row's name.
    made_up = {prompt.prompt_key for prompt in made}
    every = [
        dialogue
        for dialogue in dialogues_of([*prompts, *made], resolved, job_hash)
        if dialogue.prompt.prompt_key in made_up or in_shard(dialogue.id, shard)
    ]
    todo = [dialogue for dialogue in every if dialogue.id not in job.done]
    job.counts.resumed = len(every) - len(todo)
    if job.counts.resumed:
        say(f"{job.counts.resumed} of {len(every)} rows are there already; {len(todo)} to go")
    return todo


def _make_up(
    base: Any,
    known: list[Conversation],
    job: Job,
    settings: DistillSettings,
    options: SynthesizeOptions,
    local: LocalOptions,
) -> tuple[list[Conversation], dict[str, Any]]:
    from medusa_train.dataset.synthesize import synthesize

    return synthesize(
        base,
        options.count,
        job.out,
        known=known,
        system=settings.system,
        seed=settings.seed,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        shard=job.shard,
        batch_tokens=local.batch_tokens,
        max_rows=local.max_rows,
    )


def _load(
    base: Any, names: dict[str, Any], local: LocalOptions, device: str | None, server: ServerOptions | None
) -> Any:
    from medusa_train.modeling.base import load_base, load_tokenizer

    if not isinstance(base, str):
        return base
    if server is not None:
        return load_tokenizer(base, **names)
    if local.quantization not in (None, "8bit", "4bit"):
        raise UserError(f"unknown quantization {local.quantization!r}", allowed="8bit, 4bit")
    # Batched decoding needs masks per row, which flash attention does not take: sdpa, unless the model is eager only.
    return load_base(base, dtype=local.dtype, device=device, quantization=local.quantization, **names)


def _launched(local: LocalOptions, shard: tuple[int, int]) -> tuple[LocalOptions, tuple[int, int], str | None]:
    """Under `accelerate launch` (or torchrun) each process is a shard on its own device."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world == 1:
        return local, shard, local.device
    if shard != (1, 1):
        raise UserError("--shard and several processes at once", fix="let the launcher split the job, or give --shard")
    place = local.device
    if place is None:
        import torch

        place = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    return local, (rank + 1, world), place
