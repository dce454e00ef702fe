"""What the Trainer trains: a module that holds the heads (and the backbone) and turns a batch into channel losses.

A channel is a source of loss with its own targets and count: the lm_head (`lm`, shift 1; cross entropy or KL to the
teacher) and the heads (`head0`.. , shift j+2). `forward` returns sums, never means: dividing is the Trainer's, once,
by the counts of the whole optimizer step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.modeling.backbone import OutputProjection, hidden_states_and_middle, input_embeddings
from medusa_train.modeling.heads import MedusaHeads, Seen
from medusa_train.training import fused, losses
from medusa_train.training.fused import FusedOptions, Projection
from medusa_train.training.ledger import CPU_PIECE_TOKENS
from medusa_train.training.losses import LossTerms
from medusa_train.training.projections import dense_logits, projection_of


@dataclass(frozen=True)
class Objective:
    """Which channels a policy trains.

    Attributes:
        policy: heads_only, joint or self_distill.
        num_heads: K.
        implementation: fused, reference or liger.
        options: chunk size and ranking of the fused loss.
    """

    policy: str
    num_heads: int
    implementation: str = "fused"
    options: FusedOptions = field(default_factory=FusedOptions)

    @property
    def trains_backbone(self) -> bool:
        """Whether there is an lm channel, first in every list of channels."""
        return self.policy != "heads_only"

    @property
    def shifts(self) -> tuple[int, ...]:
        """How far ahead each channel's targets lie."""
        heads = tuple(j + 2 for j in range(self.num_heads))
        return (1, *heads) if self.trains_backbone else heads

    @property
    def channels(self) -> tuple[str, ...]:
        """Names of the channels, as they appear in logs."""
        heads = tuple(f"head{j}" for j in range(self.num_heads))
        if not self.trains_backbone:
            return heads
        return ("kl" if self.policy == "self_distill" else "lm", *heads)


class Trainee(nn.Module):
    """Heads and, unless hidden states come from a cache, the backbone.

    Args:
        backbone: the transformers model, a PeftModel around it, or None with cached hidden states.
        embedding: the backbone's input embedding, where hidden states come from a cache and heads see tokens.
        projection: the backbone's output projection; `shared` heads, the lm channel and scale / soft-cap need it.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        projection: OutputProjection,
        objective: Objective,
        backbone: nn.Module | None,
        embedding: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.objective = heads, objective
        self.backbone = backbone
        self._projection = projection
        self._original: tuple[Tensor, Tensor | None] | None = None
        # FSDP wraps by these class names; a wrapper that is no PreTrainedModel has to pass them on.
        self._no_split_modules = getattr(backbone, "_no_split_modules", None)
        self.frozen_projection: nn.Module | None = None
        if backbone is None and heads.projections is None:
            # Cached hidden states with shared heads: only the lm_head itself stays with the heads.
            self.frozen_projection = projection.module
        self.frozen_embedding = embedding if backbone is None else None

    @property
    def embedding(self) -> nn.Module:
        """The backbone's input embedding, whose rows heads with `sees: parent` see."""
        return self.frozen_embedding if self.backbone is None else input_embeddings(self.backbone)

    @property
    def projection(self) -> OutputProjection:
        """The backbone's output projection, through the module that is registered here (wrappers move it)."""
        return self._projection

    def activation_checkpointing_enable(self, **arguments: Any) -> None:
        """Called by the Trainer for `activation_checkpointing: true`; concerns the backbone only."""
        inner = self.backbone
        if inner is None or not self.objective.trains_backbone:
            return
        if hasattr(inner, "enable_input_require_grads"):
            inner.enable_input_require_grads()
        enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
        enable(**{key: value for key, value in arguments.items() if value is not None})

    def train(self, mode: bool = True) -> Trainee:
        """A frozen backbone stays in eval mode: no dropout, no buffer that moves."""
        super().train(mode)
        if self.backbone is not None and not self.objective.trains_backbone:
            self.backbone.eval()
        return self

    def forward(
        self,
        labels: Tensor,
        rows: Tensor | None = None,
        hidden: Tensor | None = None,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Any = None,
        expected: Tensor | None = None,
        soft_tokens: Tensor | None = None,
        soft_weights: Tensor | None = None,
        targets: Tensor | None = None,
        original: Tensor | None = None,
        seen: Tensor | None = None,
        middle: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Sums of every channel's loss over this micro-batch.

        With `targets` given it scores held-out rows instead (`heldout.score_rows`), against the `original` hidden rows
        of the untouched backbone where drift is asked for.

        Args:
            labels: int64 [C, M], IGNORE where a row has no target in a channel.
            rows: int64 [M], flat positions b*T+t of the supervised rows.
            hidden: [M, D] cached hidden states, in place of ids.
            seen: int64 [K, M], the tokens that heads with `sees: parent` see.
            middle: [M, D] cached hidden states of the middle layer, where the heads read one.
            soft_tokens, soft_weights: [C, M, k] soft targets of every channel, in place of the labels.
            expected: [C], the weights lambda_c / N_c by which the sums will be multiplied, if known.

        Returns:
            sums [C] (fp32), hits [C, 10] exact-rank hits and ranked [C] among the rows that were ranked.
        """
        if targets is not None:
            return self._score(labels, targets, original, rows, hidden, input_ids, position_ids, seen, middle)
        teacher_MD = None
        if hidden is None:
            if self.objective.policy == "self_distill":
                with torch.no_grad(), adapter_off(self.backbone):
                    teacher_MD, _ = self._rows(input_ids, position_ids, attention_mask, rows, None)
            with contextlib.nullcontext() if self.objective.trains_backbone else torch.no_grad():
                hidden, middle = self._rows(input_ids, position_ids, attention_mask, rows, self._reads_layer)
        hidden = self._compute(hidden)
        terms, ranked = [], []
        for index, name in enumerate(self.objective.channels):
            options = self.objective.options
            if expected is not None:
                options = replace(options, expected_gradient=expected[index])
            if name == "kl":
                terms.append(self._kl(self._compute(teacher_MD), hidden, labels[index], options))
                ranked.append(None)
                continue
            soft = None if soft_tokens is None else (soft_tokens[index], soft_weights[index])
            term, ranks = self._cross_entropy(self._channel(hidden, name, seen, middle), labels[index], options, soft)
            terms.append(term)
            ranked.append(ranks)
        return {"sums": torch.stack([term.sum for term in terms]), **_stack_ranks(ranked, labels)}

    def _rows_in_pieces(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Any, rows: Tensor, reads_layer: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """A frozen backbone on a CPU, a few lines at a time: only the lines' supervised rows are kept."""
        length = input_ids.shape[1]
        lines = max(1, CPU_PIECE_TOKENS * torch.get_num_threads() // length)
        found, middles = [], []
        for start in range(0, len(input_ids), lines):
            piece = slice(start, start + lines)
            mask = attention_mask
            if isinstance(mask, dict):
                mask = {kind: one[piece] for kind, one in mask.items()}
            elif mask is not None:
                mask = mask[piece]
            positions = None if position_ids is None else position_ids[piece]
            hidden_bTD, middle_bTD = hidden_states_and_middle(
                self.backbone,
                input_ids[piece],
                reads_layer=reads_layer,
                attention_mask=mask,
                position_ids_BT=positions,
            )
            mine = (rows >= start * length) & (rows < (start + lines) * length)
            found.append(hidden_bTD.flatten(0, 1).index_select(0, rows[mine] - start * length))
            if middle_bTD is not None:
                middles.append(middle_bTD.flatten(0, 1).index_select(0, rows[mine] - start * length))
        return torch.cat(found), torch.cat(middles) if middles else None

    @torch.no_grad()
    def _score(
        self,
        labels: Tensor,
        targets: Tensor,
        original: Tensor | None,
        rows: Tensor | None,
        hidden: Tensor | None,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        seen: Tensor | None,
        middle: Tensor | None,
    ) -> dict[str, Tensor]:
        from medusa_train.training.heldout import score_rows

        if hidden is None:
            hidden, middle = self._rows(input_ids, position_ids, None, rows, self._reads_layer)
        hidden = self._compute(hidden)
        names = ("lm" if name == "kl" else name for name in self.objective.channels)
        channels = [self._channel(hidden, name, seen, middle) for name in names]
        valid = self.projection.valid_vocab_size if self.heads.token_map is None else None
        proposable = [valid if shift >= 2 else None for shift in self.objective.shifts]
        before = None if original is None else self.original_projection(self._compute(original))
        with torch.autocast(labels.device.type, enabled=False):
            scores = score_rows(channels, labels, targets, before, proposable)
        return {**scores, "hidden": hidden}

    def keep_original(self, dtype: torch.dtype) -> None:
        """Remembers the untouched lm_head in the products' dtype before the first step, where it trains in full.

        Whole on every rank, also where the weights are sharded: all ranks call it together.
        """
        if not hasattr(self.backbone, "disable_adapter"):
            kept = (self.projection.weight, self.projection.bias)
            whole = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in kept if t is not None)
            weight, *bias = (tensor.detach().to(dtype, copy=True) for tensor in whole)
            self._original = (weight, bias[0] if bias else None)

    def original_projection(self, rows_MD: Tensor) -> Projection:
        """The untouched backbone's output projection of some rows."""
        if self._original is None:
            with adapter_off(self.backbone):
                return projection_of(self.projection, rows_MD)
        weight, bias = self._original
        return Projection(((rows_MD, weight),), bias, self.projection.scale, self.projection.softcap)

    @property
    def _reads_layer(self) -> int | None:
        return self.heads.config.reads_layer

    def _rows(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Any, rows: Tensor, reads_layer: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """(hidden_MD, middle_MD or None) at the supervised rows."""
        if input_ids.device.type == "cpu" and not torch.is_grad_enabled() and len(input_ids) > 1:
            return self._rows_in_pieces(input_ids, position_ids, attention_mask, rows, reads_layer)
        hidden_BTD, middle_BTD = hidden_states_and_middle(
            self.backbone,
            input_ids,
            reads_layer=reads_layer,
            attention_mask=attention_mask,
            position_ids_BT=position_ids,
        )
        middle_MD = None if middle_BTD is None else middle_BTD.flatten(0, 1).index_select(0, rows)
        return hidden_BTD.flatten(0, 1).index_select(0, rows), middle_MD

    def _compute(self, rows_MD: Tensor) -> Tensor:
        """Rows in the dtype of the computation: autocast's where it is on, else the heads' own."""
        kind = rows_MD.device.type
        if torch.is_autocast_enabled(kind):
            return rows_MD.to(torch.get_autocast_dtype(kind))
        return rows_MD.to(next(self.heads.parameters()).dtype)

    def _channel(self, hidden_MD: Tensor, name: str, seen_KM: Tensor | None, middle_MD: Tensor | None) -> Projection:
        if name == "lm":
            return projection_of(self.projection, hidden_MD)
        head = int(name.removeprefix("head"))
        seen = None
        if self.heads.config.sees == "parent":
            with torch.no_grad():  # the embedding is read as it stands; heads never train it
                seen = Seen(self.embedding(seen_KM[head]), middle_MD)
        features_MD = self.heads.features(hidden_MD, head, seen).to(hidden_MD.dtype)
        if self.heads.projections is None:
            return projection_of(self.projection, features_MD)
        linear = self.heads.projections[head]
        return Projection(((features_MD, linear.weight),), linear.bias, self.projection.scale, self.projection.softcap)

    def _cross_entropy(
        self, projection: Projection, labels_M: Tensor, options: FusedOptions, soft: tuple[Tensor, Tensor] | None
    ) -> tuple[LossTerms, Any]:
        # The rows have the computation's dtype already; autocast would round the reference's fp32 logits to it again.
        with torch.autocast(labels_M.device.type, enabled=False):
            if self.objective.implementation == "reference":
                return losses.cross_entropy_terms(dense_logits(projection), labels_M), None
            plain = len(projection.products) == 1 and soft is None and labels_M.numel() > 0
            if self.objective.implementation == "liger" and plain:
                from medusa_train.training.liger import liger_cross_entropy

                return liger_cross_entropy(projection, labels_M, options)
            return fused.fused_cross_entropy(projection, labels_M, options, soft)

    def _kl(self, teacher_MD: Tensor, student_MD: Tensor, labels_M: Tensor, options: FusedOptions) -> LossTerms:
        with adapter_off(self.backbone):
            teacher = projection_of(self.projection, teacher_MD)
        student = projection_of(self.projection, student_MD)
        with torch.autocast(labels_M.device.type, enabled=False):
            if self.objective.implementation == "reference":
                with torch.no_grad():
                    teacher_logits = dense_logits(teacher)
                return losses.reference_kl_terms(teacher_logits, dense_logits(student), labels_M)
            return fused.fused_kl(teacher, student, labels_M, options)


def _stack_ranks(ranked: list[Any], labels: Tensor) -> dict[str, Tensor]:
    width = max((len(one.hits) for one in ranked if one is not None), default=fused.TOP)
    nothing = torch.zeros(width, dtype=torch.int64, device=labels.device)
    zero = torch.zeros((), dtype=torch.int64, device=labels.device)
    return {
        "hits": torch.stack([nothing if one is None else one.hits for one in ranked]),
        "ranked": torch.stack([zero if one is None else one.count for one in ranked]),
    }


@contextlib.contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The teacher: adapters off and dropout off; adapters and modes are back afterwards, also after an exception."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with model.disable_adapter():
            yield
    finally:
        for module, training in modes:
            module.training = training
