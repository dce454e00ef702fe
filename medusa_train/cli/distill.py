"""`medusa-train distill`: prompts become conversations in the model's own words."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from medusa_train.errors import UserError


class Backend(str, Enum):
    """Who generates."""

    local = "local"
    server = "server"


PROMPTS, DECODING, LOCAL, SERVER, MANY = "Prompts", "Decoding", "Backend local", "Backend server", "Several machines"


def command(
    base: Annotated[
        str | None,
        typer.Option(help="Hub id, local folder or alias of the model that answers.", show_default=False),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Folder for the rows; an interrupted job there goes on.",
            show_default="runs/BASE/distill, where recipes read",
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompts: JSON, JSONL (.gz), Parquet, a folder or a hub dataset id; repeatable.",
            rich_help_panel=PROMPTS,
            show_default="those of the package",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first N prompts.", rich_help_panel=PROMPTS, show_default="all")
    ] = None,
    synthesize: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Prompts that the model makes up itself.",
            rich_help_panel=PROMPTS,
            show_default="1000 with the package's prompts, else 0",
        ),
    ] = None,
    synthesize_temperature: Annotated[
        float, typer.Option(min=0.01, help="Temperature of made-up prompts.", rich_help_panel=PROMPTS)
    ] = 1.0,
    synthesize_max_tokens: Annotated[
        int, typer.Option(min=4, help="Longest made-up prompt in tokens.", rich_help_panel=PROMPTS)
    ] = 96,
    system: Annotated[
        str | None,
        typer.Option(help="System prompt for prompts without one.", rich_help_panel=PROMPTS, show_default="none"),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest answer in tokens.",
            rich_help_panel=DECODING,
            show_default="generation_config's, else 512",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.", rich_help_panel=DECODING)] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is off.", rich_help_panel=DECODING)] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.", rich_help_panel=DECODING)] = 1.0,
    samples: Annotated[int, typer.Option(min=1, help="Answers per prompt.", rich_help_panel=DECODING)] = 1,
    seed: Annotated[int, typer.Option(help="Of everything sampled.", rich_help_panel=DECODING)] = 0,
    backend: Annotated[Backend, typer.Option(help="Who generates.")] = Backend.local,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=LOCAL)] = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="8bit or 4bit (bitsandbytes).", rich_help_panel=LOCAL, show_default="none")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="torch device.", rich_help_panel=LOCAL, show_default="the first accelerator, else cpu"),
    ] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=64,
            help="Key/value memory of the batch in tokens (rows x length).",
            rich_help_panel=LOCAL,
            show_default="20480 on a CPU, else what fits",
        ),
    ] = None,
    max_rows: Annotated[
        int | None,
        typer.Option(min=1, help="Most rows in a batch.", rich_help_panel=LOCAL, show_default="96 on a CPU, else 512"),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="File with a Jinja chat template.", show_default="the tokenizer's own"),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Hub revision.", show_default="main")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the model repository's own code.")] = False,
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of an OpenAI-compatible server (http://host:8000/v1); repeatable.",
            rich_help_panel=SERVER,
            show_default=False,
        ),
    ] = None,
    server_model: Annotated[
        str | None,
        typer.Option(help="The model's name at the server.", rich_help_panel=SERVER, show_default="its first model"),
    ] = None,
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable that holds the API key.", rich_help_panel=SERVER)
    ] = "OPENAI_API_KEY",
    concurrency: Annotated[
        int, typer.Option(min=1, help="Requests under way per server.", rich_help_panel=SERVER)
    ] = 32,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one answer.", rich_help_panel=SERVER)] = 300.0,
    retries: Annotated[
        int, typer.Option(min=0, help="Tries after the first, with growing pauses.", rich_help_panel=SERVER)
    ] = 8,
    shard: Annotated[str, typer.Option(help="This machine's share, I/N (1/4 ... 4/4).", rich_help_panel=MANY)] = "1/1",
    merge: Annotated[
        list[str] | None,
        typer.Option(
            help="Merge the shards in these folders into --out, generating nothing; repeatable.",
            rich_help_panel=MANY,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Let the model answer prompts, or prompts it makes up itself; the rows keep exactly the ids it emitted.

    The rows go to OUT/rows.jsonl, one conversation a line, as each is done. Run the same command again to go on
    after an interruption; what is there is not made again. Under `accelerate launch` each process takes a share.
    """
    from medusa_train.config.catalog import DEFAULT_SYNTHESIZED, TRAIN_PROMPTS, distill_folder
    from medusa_train.console import say

    if out is None:
        out = "runs/distill" if base is None else distill_folder(base)
    if merge:
        from medusa_train.dataset.merge import merge_shards

        merge_shards(merge, out)
        return
    if base is None:
        raise UserError("no base is named", fix="give --base (a hub id, a folder or an alias)")
    if not prompts and synthesize is None:
        prompts, synthesize = [str(TRAIN_PROMPTS)], DEFAULT_SYNTHESIZED if backend is Backend.local else 0
        made_up = f", and {synthesize} that the model makes up" if synthesize else ""
        say(f"prompts: those of the package{made_up} (--prompts PATH and --synthesize N replace them)")
        say(f"rows: {out}")
    if not prompts and not synthesize:
        raise UserError(
            "nothing to answer", fix="give --prompts PATH, or --synthesize N for prompts the model makes up"
        )
    from medusa_train.dataset.distill import DistillSettings
    from medusa_train.dataset.job import LocalOptions, ServerOptions, SynthesizeOptions, distill

    settings = DistillSettings(max_new_tokens, temperature, top_k, top_p, samples, seed, system)
    common: dict[str, Any] = {
        "base": base,
        "prompts": list(prompts or ()),
        "out": out,
        "settings": settings,
        "limit": limit,
        "shard": _shard(shard),
        "chat_template": chat_template,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
    }
    if backend is Backend.server:
        if synthesize:
            raise UserError("--synthesize works with --backend local", fix="make the prompts up locally first")
        distill(
            **common, server=ServerOptions(list(url or ()), server_model, api_key_env, concurrency, timeout, retries)
        )
        return
    if url:
        raise UserError("--url goes with --backend server", fix="add --backend server")
    distill(
        **common,
        local=LocalOptions(dtype, device, quantization, batch_tokens, max_rows),
        synthesize=SynthesizeOptions(synthesize or 0, synthesize_temperature, synthesize_max_tokens),
    )


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count):
        return int(index), int(count)
    raise UserError(f"--shard {text}", allowed="I/N with 1 <= I <= N, for example 2/4")
