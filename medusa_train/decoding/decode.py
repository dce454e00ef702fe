"""The decoder as others use it: a backbone, heads and a tree, made ready once; the rounds are in rounds.py.

Plain decoding is the same code with the tree that has a root only, so a comparison of the two compares the tree and
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from medusa_train.decoding.cache import PreallocatedCache
from medusa_train.decoding.fixed import BUCKET, FixedForwards, resolve_launch
from medusa_train.decoding.masks import TreeMasks
from medusa_train.decoding.propose import Descent, ranks_available
from medusa_train.decoding.rounds import OnRound, Rounds
from medusa_train.decoding.settings import Decoded, DecodeSettings, RoundTrace
from medusa_train.decoding.stopping import context_limit, rope_switch
from medusa_train.decoding.tree import DraftTree, TreeBuffers, build_buffers
from medusa_train.errors import UserError
from medusa_train.modeling.backbone import (
    check_supported,
    decoder_of,
    input_embeddings,
    output_projection,
    plain_model,
)
from medusa_train.modeling.heads import MedusaHeads
from medusa_train.modeling.masks import attention_kind, attention_windows

PROPOSED_RANKS = 10


class TreeDecoder:
    """A backbone, heads and a tree, made ready once and used for many prompts.

    Args:
        model: a stock decoder-only transformers model (peft-wrapped too).
        heads: None only with the empty tree.
        tree: None or the empty tree: plain decoding.
        tokenizer: for stop strings, and for its own end token.
        check: run `check_supported` first.
        launch: how a round's forward is launched: `auto`, `eager`, `graph` (CUDA), `compile`, `fixed`; see fixed.py.
            Batches of more than one row run eagerly.

    Raises:
        UserError: the model cannot be decoded exactly, or tree and heads do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        heads: MedusaHeads | None = None,
        tree: DraftTree | None = None,
        *,
        tokenizer: Any = None,
        check: bool = True,
        valid_vocab_size: int | None = None,
        launch: str = "auto",
    ) -> None:
        tree = tree or DraftTree()
        self.device = decoder_of(model).get_input_embeddings().weight.device
        if check:
            _check_attention(model, self.device)
            check_supported(model)
            attention_windows(model)
        if heads is None and tree.num_nodes:
            raise UserError("a tree with guesses needs heads to fill it")
        self.model, self.heads, self.tree, self.tokenizer = model, heads, tree, tokenizer
        self.projection = output_projection(model, valid_vocab_size)
        self.dtype = next(p.dtype for p in decoder_of(model).parameters() if p.dtype.is_floating_point)
        self.buffers = self._build_buffers()
        self.is_leaf = self.buffers.leaf_N.tolist()
        self.descent: Descent | None = None
        self.reads_layer: int | None = None
        if tree.num_nodes and heads.config.sees == "parent":
            self.descent = Descent(heads, self.projection, self.buffers, input_embeddings(model))
            self.reads_layer = heads.config.reads_layer
        self.position_limit = context_limit(plain_model(model).config)
        self.rope_switch = rope_switch(plain_model(model).config)
        way = resolve_launch(launch, self.device)
        self.fixed = None if way == "eager" else FixedForwards(self, way, may_fall_back=launch == "auto")
        self._cache: PreallocatedCache | None = None
        self._masks: TreeMasks | None = None

    def _build_buffers(self) -> TreeBuffers:
        if not self.tree.num_nodes:
            return build_buffers(self.tree, 1, device=self.device)
        available = ranks_available(self.heads, self.projection)
        self.tree.check(self.heads.config.medusa_num_heads, available)
        top_k = min(available, max(PROPOSED_RANKS, self.tree.ranks_used))
        return build_buffers(self.tree, top_k, self.heads.config.medusa_num_heads, self.device)

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        settings: DecodeSettings = DecodeSettings(),
        *,
        on_round: OnRound | None = None,
        trace: bool = False,
        processors: Any = None,
        stop_rules: Sequence[Callable] = (),
        seen_prompts: Sequence[Sequence[int]] | None = None,
    ) -> list[Decoded]:
        """Continues each prompt; prompts may differ in length.

        Args:
            on_round: called after each round of each unfinished row with (batch row, what happened).
            trace: keep proposals, tree tokens and targets of every round.
            processors: transformers logits processors in place of those that the settings name.
            stop_rules: further transformers stopping criteria.
            seen_prompts: what processors and criteria see in place of the prompts: padded rows, inside `generate`.
        """
        prompts = [[int(token) for token in prompt] for prompt in prompts]
        if not prompts or not all(prompts):
            raise UserError("a prompt with no tokens", allowed="at least one token per prompt")
        seen = None if seen_prompts is None else [[int(token) for token in prompt] for prompt in seen_prompts]
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                return Rounds(self, prompts, settings, on_round, trace, processors, stop_rules, seen).finish()
        finally:
            self.model.train(was_training)

    def room(self, batch: int, capacity: int) -> tuple[PreallocatedCache, TreeMasks]:
        """Cache and masks for a request, kept for the next one where they fit it and are not far too large."""
        cache, masks = self._cache, self._masks
        # What was recorded or compiled for a cache is worth more than the room that a smaller one would save.
        largest = 4 * capacity if self.fixed is None or cache is None else cache.capacity
        if cache is None or cache.batch != batch or not capacity <= cache.capacity <= largest:
            # Rounded up, so that requests of about one size share one allocation.
            step = BUCKET if self.fixed is not None else 64
            capacity = -(-capacity // step) * step
            layers = plain_model(self.model).config.get_text_config(decoder=True).num_hidden_layers
            cache = self._cache = PreallocatedCache(layers, batch, capacity)
            masks = self._masks = TreeMasks(self.model, self.buffers, capacity, self.dtype)
        return cache, masks


def decode(
    model: nn.Module,
    heads: MedusaHeads | None,
    prompt_ids: Sequence[int],
    tree: DraftTree | None = None,
    *,
    on_tokens: Callable[[RoundTrace], None] | None = None,
    trace: bool = False,
    tokenizer: Any = None,
    launch: str = "auto",
    **settings: Any,
) -> Decoded:
    """Continues one prompt; `settings` are the fields of DecodeSettings. tree=None is plain decoding.

    For many prompts keep a `TreeDecoder`: it builds its buffers once.
    """
    for name in ("stop_token_ids", "stop_strings"):
        if settings.get(name) is not None:
            settings[name] = tuple(settings[name])
    decoder = TreeDecoder(model, heads, tree, tokenizer=tokenizer, launch=launch)
    on_round = None if on_tokens is None else (lambda _, done: on_tokens(done))
    return decoder.decode([prompt_ids], DecodeSettings(**settings), on_round=on_round, trace=trace)[0]


def _check_attention(model: nn.Module, device: torch.device) -> None:
    kind = attention_kind(model)
    # transformers hands a dense mask on to flex attention as a score modification, so the tree's mask is the same one.
    # On a CPU torch's compiled flex kernel corrupts memory at the few rows of a round (seen with 2.13).
    allowed = ("sdpa", "eager", "flex_attention") if device.type == "cuda" else ("sdpa", "eager")
    if kind not in allowed:
        raise UserError(
            f"attention {kind!r} on {device.type} cannot run tree verification, which needs a 4-D mask",
            allowed=", ".join(allowed),
            fix="load the base with attn_implementation='sdpa'",
        )
