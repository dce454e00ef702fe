"""Opens checkpoints for measuring: which arms run on which backbone, and the real decoders behind them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_train.errors import UserError, unknown_name
from medusa_train.evaluation.groups import ArmInfo, Decoder, GroupInfo, OpenedGroup, RunOptions, TreeInfo
from medusa_train.evaluation.records import AnswerRecord, RoundRecord
from medusa_train.provenance import sha256_json

STORED = "stored"
OnTokens = Callable[[int], None]
MODES = ("greedy", "typical", "sample")


@dataclass(frozen=True)
class ArmRequest:
    """What to measure: every tree in every mode on every checkpoint.

    Attributes:
        trees: "stored" (the checkpoint's own) or anything that `decoding.tree_text.parse_tree` takes.
        base, dtype, device, quantization, attn_implementation, trust_remote_code: as `checkpoint.load_with_base`.
        baseline: measure plain decoding too; generate: and transformers' own generate.
    """

    checkpoints: tuple[str, ...]
    trees: tuple[str, ...] = (STORED,)
    modes: tuple[str, ...] = ("greedy",)
    base: str | None = None
    dtype: str = "auto"
    device: str | None = None
    quantization: str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    baseline: bool = True
    generate: bool = False


def open_groups(request: ArmRequest, options: RunOptions) -> Iterator[OpenedGroup]:
    """Checkpoints that share an unchanged backbone run on one loaded copy of it; each changed backbone on its own.

    Every checkpoint is checked before the first model is loaded.

    Raises:
        UserError: a mode, tree or checkpoint that cannot be used.
    """
    from medusa_train.checkpoint import find_checkpoint, load_checkpoint

    for mode in request.modes:
        if mode not in MODES:
            raise unknown_name("acceptance mode", mode, MODES, where="--mode")
    labels = _labels(request.checkpoints)
    grouped: dict[Any, list[tuple[str, Path]]] = {}
    for label, name in zip(labels, request.checkpoints, strict=True):
        folder = find_checkpoint(name)
        entry = load_checkpoint(folder).manifest.backbone
        alone = entry.changed != "none"
        key = label if alone else (entry.fingerprint, entry.chat_template_hash)
        grouped.setdefault(key, []).append((label, folder))
    for members in grouped.values():
        yield _open(members, request, options, several=len(request.checkpoints) > 1)


def _labels(checkpoints: Sequence[str]) -> list[str]:
    """The shortest endings of the paths that tell the checkpoints apart."""
    parts = [Path(name).parts for name in checkpoints]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    raise UserError("a checkpoint is named twice", where=", ".join(checkpoints), fix="name each checkpoint once")


def _open(members: list[tuple[str, Path]], request: ArmRequest, options: RunOptions, *, several: bool) -> OpenedGroup:
    from medusa_train.checkpoint import load_checkpoint, load_with_base
    from medusa_train.decoding.decode import TreeDecoder
    from medusa_train.modeling.masks import attention_kind

    base, first = load_with_base(
        members[0][1],
        request.base,
        merge=True,
        dtype=request.dtype,
        device=request.device,
        quantization=request.quantization,
        attn_implementation=request.attn_implementation,
        trust_remote_code=request.trust_remote_code,
    )
    loaded = [first, *(load_checkpoint(folder, base) for _, folder in members[1:])]
    infos: list[ArmInfo] = []
    decoders: list[Decoder] = []
    for (label, _), checkpoint in zip(members, loaded, strict=True):
        for text in request.trees:
            tree, info = _tree(text, checkpoint)
            decoder = TreeDecoder(
                base.model, checkpoint.heads, tree, tokenizer=base.tokenizer, valid_vocab_size=len(base.tokenizer)
            )
            for mode in request.modes:
                name = ", ".join(([label] if several else []) + [info.name, mode])
                infos.append(
                    ArmInfo(
                        name=name,
                        checkpoint=label,
                        checkpoint_hash=_checkpoint_hash(checkpoint.manifest),
                        mode=mode,
                        heads=checkpoint.manifest.medusa_num_heads,
                        tree=info,
                    )
                )
                decoders.append(_tree_decoder(decoder, mode, options))
    plain_decoder = TreeDecoder(base.model, tokenizer=base.tokenizer)
    laws = dict.fromkeys("sample" if mode == "sample" else "greedy" for mode in request.modes)
    return OpenedGroup(
        info=GroupInfo(
            base=base.name,
            base_fingerprint=base.fingerprint,
            checkpoint=", ".join(label for label, _ in members),
            dtype=str(plain_decoder.dtype).removeprefix("torch."),
            device=str(plain_decoder.device),
            arms=tuple(infos),
            quantization=request.quantization,
            attention=attention_kind(base.model),
        ),
        plain={law: _plain_decoder(plain_decoder, law, options) for law in laws} if request.baseline else {},
        generate=_generate(base) if request.generate else None,
        arms=tuple(decoders),
        **_text_functions(base),
    )


def _text_functions(base: Any) -> dict[str, Any]:
    from medusa_train.dataset import Message, render_prompt
    from medusa_train.modeling.backbone import hidden_states, output_projection

    def next_logits(ids: Sequence[int], rows: int | None = None) -> list[float]:
        import torch
        from transformers import DynamicCache

        with torch.inference_mode():
            device = base.model.get_input_embeddings().weight.device
            ids_1T = torch.tensor([list(ids)], device=device)
            cache = None if rows is None else DynamicCache(config=base.model.config)
            for piece_1t in ids_1T.split(rows or len(ids), dim=1):
                hidden_1tD = hidden_states(base.model, piece_1t, cache=cache)
            return output_projection(base.model)(hidden_1tD[:, -1])[0].float().tolist()

    from medusa_train.decoding.stopping import rope_switch

    config = base.model.config.get_text_config(decoder=True)
    return {
        "render": lambda messages: render_prompt(base, [Message(role, content) for role, content in messages]),
        "detokenize": lambda ids: base.tokenizer.decode(list(ids)),
        "answer_text": lambda ids: base.tokenizer.decode(list(ids), skip_special_tokens=True).strip(),
        "next_logits": next_logits,
        "context_length": getattr(config, "max_position_embeddings", None),
        "rope_switch": rope_switch(base.model.config),
    }


def _checkpoint_hash(manifest: Any) -> str:
    """Of what decides the proposals and the backbone; a tree stored later does not change it."""
    adapter = {name: entry.sha256 for name, entry in manifest.files.items() if name.startswith("adapter/")}
    return sha256_json([manifest.tensors, manifest.backbone.model_dump(), adapter])


def _tree(text: str, checkpoint: Any) -> tuple[Any, TreeInfo]:
    from medusa_train.decoding.tree_text import parse_tree, tree_from_json

    content: Any = None
    if text == STORED:
        content = checkpoint.tree
        if content is None:
            raise UserError(
                "this checkpoint has no searched tree",
                where=str(checkpoint.folder),
                fix=f"run `medusa-train tree {checkpoint.folder}` first, or give one: --tree chain, --tree 4,3,2,2",
            )
        tree = tree_from_json(content, where=str(checkpoint.folder / "tree.json"))
    else:
        tree = parse_tree(text, checkpoint.manifest.medusa_num_heads)
        if Path(text).is_file():
            content = json.loads(Path(text).read_text(encoding="utf-8"))
    return tree, _tree_info(_tree_name(text, tree.num_nodes), tree.paths, content)


def _tree_name(text: str, nodes: int) -> str:
    name = f"{text} tree" if not Path(text).is_file() else f"tree {Path(text).name}"
    return f"{name}, {nodes} nodes"


def _tree_info(name: str, paths: Sequence[tuple[int, ...]], content: Any) -> TreeInfo:
    """What the search wrote beside the paths, where it did."""
    info = TreeInfo(name=name, paths=tuple(paths))
    if not isinstance(content, dict):
        return info
    info = replace(
        info, method=content.get("method"), expected_tokens_per_round=content.get("expected_tokens_per_round")
    )
    counted = content.get("calibration") or {}
    if isinstance(counted, dict) and counted.get("hits") and len(counted["hits"]) == len(counted.get("counts", ())):
        heads = zip(counted["hits"], counted["counts"], strict=True)
        info = replace(info, calibration=tuple((tuple(map(int, hits)), int(count)) for hits, count in heads))
    stored = content.get("node_probability")
    if not isinstance(stored, list) or len(stored) != len(content["paths"]):
        return info
    by_path = {tuple(path): float(p) for path, p in zip(content["paths"], stored, strict=True)}
    return replace(info, probability=tuple(by_path[path] for path in info.paths))


def _settings(mode: str, options: RunOptions, limit: int, seed: int) -> Any:
    from medusa_train.decoding.settings import DecodeSettings

    own: dict[str, Any] = {}
    if mode == "sample":
        own = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p, "seed": seed}
    elif mode == "typical":
        own = {
            "temperature": options.temperature,
            "epsilon": options.typical_eps,
            "alpha": options.typical_alpha,
        }
    return DecodeSettings(mode=mode, max_new_tokens=limit, **own)


def _traced(decoder: Any, prompt_ids: Sequence[int], settings: Any, on_tokens: OnTokens) -> Any:
    """One answer of any arm, traced: on an accelerator the stage clocks wait for it, and all arms must wait alike."""
    return decoder.decode([prompt_ids], settings, on_round=lambda _, done: on_tokens(len(done.tokens)), trace=True)[0]


def _tree_decoder(decoder: Any, mode: str, options: RunOptions) -> Decoder:
    def run(prompt_ids: Sequence[int], limit: int, seed: int, on_tokens: OnTokens) -> AnswerRecord:
        answer = _traced(decoder, prompt_ids, _settings(mode, options, limit, seed), on_tokens)
        rounds = tuple(_round_record(round_) for round_ in answer.rounds)
        return AnswerRecord(
            token_ids=tuple(answer.token_ids),
            rounds=rounds,
            step_seconds=(),
            prefill_s=answer.prefill_seconds,
            # The rounds' own clocks: what keeping the trace costs is not the decoder's.
            decode_s=sum(round_.seconds[0] for round_ in rounds if round_.seconds),
            finish=answer.finish_reason,
        )

    return run


def _round_record(round_: Any) -> RoundRecord:
    s = round_.seconds
    return RoundRecord(
        path=tuple(round_.path),
        tokens=tuple(round_.tokens),
        proposals=tuple(tuple(ids) for ids in round_.proposals),
        tree_tokens=tuple(round_.tree_tokens),
        target_tokens=tuple(round_.target_tokens),
        ended=round_.ended,
        seconds=() if s is None else (s.total, s.propose, s.forward, s.accept, s.commit),
    )


def _plain_decoder(decoder: Any, law: str, options: RunOptions) -> Decoder:
    def run(prompt_ids: Sequence[int], limit: int, seed: int, on_tokens: OnTokens) -> AnswerRecord:
        answer = _traced(decoder, prompt_ids, _settings(law, options, limit, seed), on_tokens)
        steps = tuple(step.seconds.total for step in answer.rounds if step.seconds is not None)
        return AnswerRecord(
            tuple(answer.token_ids), (), steps, answer.prefill_seconds, sum(steps), answer.finish_reason
        )

    return run


def _generate(base: Any) -> Decoder:
    """transformers' generate, greedy, with every processor of the model's generation_config switched off."""

    def run(prompt_ids: Sequence[int], limit: int, seed: int, on_tokens: OnTokens) -> AnswerRecord:
        import torch

        from medusa_train.decoding.stopping import eos_token_ids

        device = base.model.get_input_embeddings().weight.device
        ids_BT = torch.tensor([list(prompt_ids)], device=device)
        started = time.perf_counter()
        with torch.inference_mode():
            output_BT = base.model.generate(
                ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                max_new_tokens=limit,
                eos_token_id=list(eos_token_ids(base.model, base.tokenizer)) or None,
                do_sample=False,
                temperature=None,
                top_k=None,
                top_p=None,
                repetition_penalty=1.0,
                num_beams=1,
            )
        token_ids = tuple(output_BT[0, ids_BT.shape[1] :].tolist())
        seconds = time.perf_counter() - started
        return AnswerRecord(token_ids, (), (), 0.0, seconds, "length" if len(token_ids) >= limit else "stop")

    return run
