"""`medusa-train generate`: streams an answer with the heads on, guessed tokens in another colour."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Annotated, Any

import typer

from medusa_train.cli.options import BaseOption, DeviceOption, DtypeOption, QuantizationOption, TrustRemoteCodeOption
from medusa_train.errors import UserError


class GenerateMode(str, Enum):
    """How guesses are accepted."""

    greedy = "greedy"
    typical = "typical"
    sample = "sample"


CHOICE, SPEED = "How tokens are chosen", "Heads and tree"
ACCEPTED_STYLE = "bold green"


def command(
    checkpoint: Annotated[str, typer.Argument(help="Folder that `fit` wrote, or a hub id.", show_default=False)],
    prompt: Annotated[
        str | None,
        typer.Option(help="The user's message; - or nothing reads it from stdin.", show_default=False),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before it.", show_default=False)] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens at most.")] = 256,
    stop: Annotated[list[str] | None, typer.Option(help="End after this text; repeatable.", show_default=False)] = None,
    mode: Annotated[
        GenerateMode,
        typer.Option(
            help="greedy: exact, the tokens of plain greedy decoding. sample: exact in distribution. typical: a "
            "heuristic, keeps plausible guesses.",
            rich_help_panel=CHOICE,
        ),
    ] = GenerateMode.greedy,
    temperature: Annotated[float, typer.Option(help="sample and typical.", rich_help_panel=CHOICE)] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="sample.", rich_help_panel=CHOICE, show_default=False)] = None,
    top_p: Annotated[float | None, typer.Option(help="sample.", rich_help_panel=CHOICE, show_default=False)] = None,
    epsilon: Annotated[float, typer.Option(help="typical: hard threshold.", rich_help_panel=CHOICE)] = 0.09,
    alpha: Annotated[float, typer.Option(help="typical: weight of the entropy.", rich_help_panel=CHOICE)] = 0.3,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="greedy and sample.", rich_help_panel=CHOICE, show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="sample.", rich_help_panel=CHOICE)] = 0,
    tree: Annotated[
        str,
        typer.Option(
            help="stored (the checkpoint's searched tree), chain, chain:DEPTH, widths such as 4,3,2,2, a JSON file of "
            "rank paths, or none (plain decoding).",
            rich_help_panel=SPEED,
        ),
    ] = "stored",
    launch: Annotated[
        str,
        typer.Option(
            help="How a round's forward is launched: auto (graph on CUDA, else eager), eager, graph, or compile "
            "(torch.compile: faster on CPUs too, after a minute or more of compiling; needs a C++ compiler there).",
            rich_help_panel=SPEED,
        ),
    ] = "auto",
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode plainly afterwards and print both speeds.", rich_help_panel=SPEED)
    ] = False,
    base: BaseOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    quantization: QuantizationOption = None,
    trust_remote_code: TrustRemoteCodeOption = False,
) -> None:
    """Stream an answer with the heads on; it ends with tokens per round and speed.

    Tokens that the heads guessed and the model confirmed are coloured; the rest is the model's own.
    """
    text = _prompt_text(prompt)
    from medusa_train.checkpoint import load_with_base
    from medusa_train.console import say
    from medusa_train.decoding.decode import TreeDecoder
    from medusa_train.decoding.settings import PROMISES, DecodeSettings

    settings = DecodeSettings(
        mode=mode.value,
        max_new_tokens=max_new_tokens,
        stop_strings=tuple(stop or ()),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        epsilon=epsilon,
        alpha=alpha,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    loaded, opened = load_with_base(
        checkpoint,
        base,
        dtype=dtype,
        device=device,
        quantization=quantization,
        trust_remote_code=trust_remote_code,
        merge=quantization is None,
    )
    ids = _prompt_ids(loaded, text, system, raw)
    draft = _chosen_tree(tree, opened)
    decoder = TreeDecoder(
        loaded.model,
        opened.heads,
        draft,
        tokenizer=loaded.tokenizer,
        valid_vocab_size=len(loaded.tokenizer),
        launch=launch,
    )
    say(f"mode {mode.value} ({PROMISES[mode.value]}); {draft.num_nodes} guesses a round")
    done = _stream(decoder, ids, settings, loaded.tokenizer)
    say(_speed_line("with heads" if draft.num_nodes else "plain", done))
    if compare and draft.num_nodes:
        plain = TreeDecoder(loaded.model, tokenizer=loaded.tokenizer, check=False, launch=launch).decode(
            [ids], settings
        )[0]
        say(_speed_line("plain", plain))
        per_token = plain.decode_seconds / len(plain.token_ids), done.decode_seconds / len(done.token_ids)
        same = "the same tokens" if plain.token_ids == done.token_ids else "other tokens"
        say(f"speedup {per_token[0] / per_token[1]:.2f}x, {same}")


def _prompt_text(prompt: str | None) -> str:
    if prompt is None or prompt == "-":
        if prompt is None and sys.stdin.isatty():
            raise UserError("no prompt", fix='give --prompt "...", or pipe text in')
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise UserError("the prompt is empty")
    return prompt


def _prompt_ids(loaded: Any, text: str, system: str | None, raw: bool) -> list[int]:
    if raw:
        ids = loaded.tokenizer(text).input_ids
        if not ids:
            raise UserError("the prompt has no tokens")
        return ids
    from medusa_train.dataset import Message, render_prompt

    messages = [Message("user", text)]
    if system is not None:
        messages.insert(0, Message("system", system))
    return render_prompt(loaded, messages)


def _chosen_tree(text: str, opened: Any) -> Any:
    from medusa_train.console import say
    from medusa_train.decoding.tree import DraftTree
    from medusa_train.decoding.tree_text import parse_tree, tree_from_json

    if text != "stored":
        return parse_tree(text, opened.heads.config.medusa_num_heads)
    if opened.tree is None:
        say("note: no tree was searched yet, a chain is used; `medusa-train tree` finds a better one")
        return DraftTree.chain(opened.heads.config.medusa_num_heads)
    return tree_from_json(opened.tree, where="tree.json")


def _stream(decoder: Any, ids: list[int], settings: Any, tokenizer: Any) -> Any:
    from rich.text import Text

    from medusa_train.console import out
    from medusa_train.decoding.stream import TextStream

    stream, screen = TextStream(tokenizer), out()

    def show(_: int, done: Any) -> None:
        for index, token in enumerate(done.tokens):
            piece = stream.push(token)
            if piece:
                screen.print(Text(piece, style=ACCEPTED_STYLE if index else ""), end="", soft_wrap=True)
        screen.file.flush()

    answer = decoder.decode([ids], settings, on_round=show)[0]
    screen.print(Text(stream.flush()), soft_wrap=True)
    return answer


def _speed_line(name: str, done: Any) -> str:
    count, rounds = len(done.token_ids), len(done.rounds)
    speed = count / done.decode_seconds if done.decode_seconds > 0 else float("nan")
    return (
        f"{name}: {count} tokens in {rounds} rounds, {done.tokens_per_round:.2f} tokens per round (root counted), "
        f"{speed:.1f} tokens/s, {1000 * done.decode_seconds / max(1, rounds):.0f} ms per round, "
        f"prompt {done.prefill_seconds:.2f} s, ended by {'a stop' if done.finish_reason == 'stop' else 'the limit'}"
    )
