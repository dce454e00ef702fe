"""`distill --backend local`: the job run by the engine on this machine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

from medusa_train.console import progress
from medusa_train.dataset.backend_local import LocalEngine
from medusa_train.dataset.dialogue import Dialogue
from medusa_train.dataset.distill import Job
from medusa_train.dataset.render import render_prompt
from medusa_train.dataset.requests import Completion, Request
from medusa_train.dataset.sampling import Decoding
from medusa_train.errors import UserError

# On a CPU more rows cost attention and memory and win little beyond this (measured: 64 rows 630 tokens/s, 96 rows 720,
# 128 rows 610 on two cores with a 135M model).
CPU_ROWS, CPU_TOKENS = 96, 20480
GPU_ROWS, GPU_MEMORY_SHARE = 512, 0.6


def engine_for(
    base: Any,
    decoding: Decoding,
    stop_ids: list[int],
    *,
    batch_tokens: int | None = None,
    max_rows: int | None = None,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> LocalEngine:
    """An engine whose batch fits the device, unless told otherwise."""
    if base.model.device.type == "cpu":
        rows, tokens = CPU_ROWS, CPU_TOKENS
    else:
        rows, tokens = GPU_ROWS, _gpu_tokens(base.model)
    return LocalEngine(
        base,
        stop_token_ids=stop_ids,
        decoding=decoding,
        batch_tokens=batch_tokens or tokens,
        max_rows=max_rows or rows,
        on_tokens=on_tokens,
    )


def _gpu_tokens(model: Any) -> int:
    """Tokens of key/value memory that fit into the share of the free GPU memory."""
    import torch

    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * size * torch.finfo(model.dtype).bits // 8
    free, _ = torch.cuda.mem_get_info(model.device)
    return max(4096, int(free * GPU_MEMORY_SHARE) // per_token)


def run_local(
    job: Job,
    dialogues: list[Dialogue],
    base: Any,
    resolved: dict[str, Any],
    *,
    batch_tokens: int | None = None,
    max_rows: int | None = None,
) -> None:
    """Answers the dialogues and writes each to the journal as soon as its last turn is done."""
    decoding = Decoding(resolved["temperature"], resolved["top_k"], resolved["top_p"])
    stop = set(resolved["stop_token_ids"])
    last_words = time.monotonic()
    with progress("distill", total=len(dialogues), unit="rows") as bar:

        def on_tokens(count: int) -> None:
            nonlocal last_words
            job.tokens(count)
            if time.monotonic() - last_words > 1:
                last_words = time.monotonic()
                bar.describe(f"distill ({job.rate_text()})")

        engine = engine_for(
            base, decoding, sorted(stop), batch_tokens=batch_tokens, max_rows=max_rows, on_tokens=on_tokens
        )

        def ask(dialogue: Dialogue) -> None:
            turn = dialogue.turn
            seed = int.from_bytes(hashlib.sha256(f"{dialogue.seed}:{turn}".encode()).digest()[:8], "big")
            try:
                prompt_ids = render_prompt(base, dialogue.messages)
                engine.submit(Request(dialogue, prompt_ids, resolved["max_new_tokens"], seed, wave=turn))
            except UserError as error:
                # Lengths differ from prompt to prompt; the reason is one.
                too_long = "exceed the model's context" in error.what
                reason = "longer than the context" if too_long else error.what.split(":")[0][:80]
                job.counts.skipped[reason] += 1
                dialogue.give_up()
                if turn:
                    job.keep(dialogue, "local")
                bar.advance()

        def on_finish(completion: Completion) -> None:
            dialogue: Dialogue = completion.request.key
            answer_ids = completion.token_ids
            spoken = answer_ids[:-1] if completion.finish_reason == "stop" else answer_ids
            text = base.tokenizer.decode(spoken, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            dialogue.answer(text, list(completion.request.prompt_ids), answer_ids, completion.finish_reason, exact=True)
            if dialogue.done:
                job.keep(dialogue, "local")
                bar.advance()
            else:
                ask(dialogue)

        for dialogue in dialogues:
            ask(dialogue)
        engine.run(on_finish)
        bar.describe(f"distill ({job.rate_text()})")
