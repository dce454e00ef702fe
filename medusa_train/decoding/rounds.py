"""The rounds of one request: propose -> tree forward -> accept -> commit, until every answer is finished.

The backbone is a stock transformers model; positions, masks and the cache are arguments of its forward.

Shape letters: B batch, N tree rows, D hidden, V vocabulary, L path width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_train.decoding.choose import Chooser
from medusa_train.decoding.propose import top_tokens
from medusa_train.decoding.settings import Decoded, DecodeSettings, RoundTrace, Seconds
from medusa_train.decoding.stopping import StopRules
from medusa_train.decoding.verify import Acceptance, greedy_accept, typical_accept, walk_accept
from medusa_train.errors import UserError
from medusa_train.modeling.backbone import hidden_states_and_middle

if TYPE_CHECKING:
    from medusa_train.decoding.decode import TreeDecoder

OnRound = Callable[[int, RoundTrace], None]


@dataclass
class _Answer:
    """One batch row on its way."""

    prompt: list[int]
    limit: int
    before: list[
        int
    ]  # what processors and criteria see before the answer: the prompt, with its padding where it has any
    tokens: list[int] = field(default_factory=list)
    rounds: list[RoundTrace] = field(default_factory=list)
    finish_reason: str | None = None


class Rounds:
    """One call of decode: the state between rounds."""

    def __init__(
        self,
        decoder: TreeDecoder,
        prompts: list[list[int]],
        settings: DecodeSettings,
        on_round: OnRound | None,
        trace: bool,
        processors: Any = None,
        stop_rules: Sequence[Callable] = (),
        seen_prompts: list[list[int]] | None = None,
    ) -> None:
        self.d, self.settings, self.on_round, self.trace = decoder, settings, on_round, trace
        self.stop = StopRules.of(decoder.model, decoder.tokenizer, settings, stop_rules)
        limit = decoder.position_limit
        for prompt in prompts:
            if limit is not None and len(prompt) > limit:
                raise UserError(f"a prompt of {len(prompt)} tokens", allowed=f"at most {limit} positions")
        # A token at the first position past the end needs no forward, so it can still be generated.
        limits = [
            settings.max_new_tokens if limit is None else min(settings.max_new_tokens, limit + 1 - len(prompt))
            for prompt in prompts
        ]
        if decoder.rope_switch is not None:
            for prompt, most in zip(prompts, limits, strict=True):
                decoder.rope_switch.check(len(prompt), most, decoder.tree.depth)
        self.answers = [
            _Answer(prompt, most, before)
            for prompt, most, before in zip(prompts, limits, seen_prompts or prompts, strict=True)
        ]
        self.chooser = Chooser.of(settings, [answer.before for answer in self.answers], decoder.device, processors)
        # A row that ends inside a path has committed all of it, and stages its N rows behind that while others go on.
        beyond = decoder.tree.depth + decoder.buffers.num_rows
        capacity = max(len(p) + most for p, most in zip(prompts, limits, strict=True)) + beyond
        self.cache, self.masks = decoder.room(len(prompts), capacity)
        self.lengths = [len(prompt) for prompt in prompts]
        self.batch_B = torch.arange(len(prompts), device=decoder.device)

    def finish(self) -> list[Decoded]:
        """Runs to the end."""
        started = time.perf_counter()
        self._prefill()
        self._sync()
        decided = time.perf_counter()
        while self._round():
            pass
        ended = time.perf_counter()
        return [
            Decoded(
                token_ids=tuple(answer.tokens),
                rounds=tuple(answer.rounds),
                finish_reason=answer.finish_reason,
                prefill_seconds=decided - started,
                decode_seconds=ended - decided,
                mode=self.settings.mode,
                cache_bytes=self.cache.num_bytes,
            )
            for answer in self.answers
        ]

    def _sync(self) -> None:
        # Stage times mean nothing on an accelerator without it; the round needs its result there anyway.
        if self.d.device.type == "cuda":
            torch.cuda.synchronize(self.d.device)

    def _prefill(self) -> None:
        """Runs the prompts in chunks, right-padded: causal attention keeps the padding out of every real row."""
        longest = max(self.lengths)
        # Frequencies that follow the text's length must see all of the prompt at once.
        chunk = self.settings.prefill_chunk if self.d.rope_switch is None else longest
        padded = torch.tensor(
            [answer.prompt + [answer.prompt[-1]] * (longest - len(answer.prompt)) for answer in self.answers],
            device=self.d.device,
        )
        last_B = torch.tensor(self.lengths, device=self.d.device) - 1
        hidden_BD = middle_BD = None
        for start in range(0, longest, chunk):
            ids_BT = padded[:, start : start + chunk]
            count = ids_BT.shape[1]
            self.cache.stage(start, count)
            positions = torch.arange(start, start + count, device=self.d.device).expand(len(self.answers), -1)
            hidden_BTD, middle_BTD = hidden_states_and_middle(
                self.d.model, ids_BT, reads_layer=self.d.reads_layer, position_ids_BT=positions, cache=self.cache
            )
            self.cache.build_slabs()
            at_B = (last_B - start).clamp(0, count - 1)
            inside_B1 = ((last_B >= start) & (last_B < start + count))[:, None]
            hidden_BD = _take(hidden_BTD[self.batch_B, at_B], inside_B1, hidden_BD)
            if middle_BTD is not None:
                middle_BD = _take(middle_BTD[self.batch_B, at_B], inside_B1, middle_BD)
        self.hidden_BD, self.middle_BD = hidden_BD, middle_BD
        logits_BV = self.d.projection(hidden_BD)
        self.root_B = self.chooser.roots(logits_BV)
        self.roots = self.root_B.tolist()

    def _round(self) -> bool:
        """One round of every unfinished row; False when none is left."""
        started = time.perf_counter()
        for b, answer in enumerate(self.answers):
            if answer.finish_reason is None:
                self._end_on_root(b, answer)
        if all(answer.finish_reason is not None for answer in self.answers):
            return False
        tokens_BN, proposals_BJk = self._propose()
        self._stamp_sync()
        proposed = time.perf_counter()
        hidden_BND, middle_BND, logits_BNV = self._forward(tokens_BN)
        self._stamp_sync()
        forwarded = time.perf_counter()
        acceptance = self._accept(tokens_BN, logits_BNV)
        # All that the host has to know, in one copy: the only wait for the device in a round.
        num_rows = tokens_BN.shape[1]
        known = torch.cat([tokens_BN, acceptance.path_BL, acceptance.next_root_B[:, None]], dim=1).tolist()
        rows_BN = [row[:num_rows] for row in known]
        paths = [[node for node in row[num_rows:-1] if node >= 0] for row in known]
        next_roots = [row[-1] for row in known]
        accepted = time.perf_counter()
        self._commit(paths, acceptance)
        # The frontier's states are the winner's.
        self.hidden_BD = hidden_BND[self.batch_B, acceptance.winner_B]
        self.middle_BD = None if middle_BND is None else middle_BND[self.batch_B, acceptance.winner_B]
        done = [self._publish(b, rows_BN[b], paths[b]) for b in range(len(self.answers))]
        self.root_B, self.roots = acceptance.next_root_B, next_roots
        self._stamp_sync()
        committed = time.perf_counter()
        if self.trace:
            done = self._with_trace(done, proposals_BJk, rows_BN, acceptance)
        seconds = Seconds(
            proposed - started, forwarded - proposed, accepted - forwarded, committed - accepted, committed - started
        )
        for b, outcome in enumerate(done):
            if outcome is not None:
                outcome = replace(outcome, seconds=seconds)
                self.answers[b].rounds.append(outcome)
                if self.on_round is not None:
                    self.on_round(b, outcome)
        return True

    def _stamp_sync(self) -> None:
        if self.trace:
            self._sync()

    def _end_on_root(self, b: int, answer: _Answer) -> None:
        """A root that ends the answer is published at once: nothing after it is wanted, so no forward runs."""
        root = self.roots[b]
        stops = self.stop.at(answer.before, answer.tokens, root)
        if not stops and len(answer.tokens) + 1 < answer.limit:
            return
        answer.tokens.append(root)
        answer.finish_reason = "stop" if stops else "length"
        outcome = RoundTrace(root, (), (root,), 0, "stop" if stops else "limit")
        answer.rounds.append(outcome)
        if self.on_round is not None:
            self.on_round(b, outcome)

    def _propose(self) -> tuple[Tensor, Tensor | None]:
        """The tree's tokens [B, N], the root first, and the heads' proposals [B, J, k].

        Heads that see the parent have no one list of proposals a depth: None, as without heads.
        """
        root_B1 = self.root_B[:, None]
        if not self.d.tree.num_nodes:
            return root_B1, None
        if self.d.descent is not None:
            return self.d.descent(self.hidden_BD, self.middle_BD, self.root_B), None
        tokens_BJk = top_tokens(
            self.d.heads,
            self.hidden_BD,
            self.d.projection,
            num_heads=self.d.tree.depth,
            k=self.d.buffers.top_k,
        )
        candidates_BS = torch.cat([root_B1, tokens_BJk.flatten(1)], dim=1)
        return candidates_BS.index_select(1, self.d.buffers.tree_indices_N), tokens_BJk

    def _forward(self, tokens_BN: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """(hidden_BND, middle_BND, logits_BNV) of the tree's rows; their K/V are staged behind the prefix.

        middle_BND is the middle layer's, where the heads read one.
        """
        buffers = self.d.buffers
        if len(self.answers) == 1:
            length = self.lengths[0]
            if self.d.fixed is not None:
                return self.d.fixed(self.cache, self.masks, tokens_BN, length)
            self.cache.stage(length, buffers.num_rows)
            positions_BN = (buffers.depth_N + length)[None]
            mask = self.masks.view(length)
        else:
            lengths_B = torch.tensor(self.lengths, device=tokens_BN.device)
            end = max(self.lengths) + buffers.num_rows
            order_N = torch.arange(buffers.num_rows, device=tokens_BN.device)
            self.cache.stage_ragged(lengths_B[:, None] + order_N, end)
            positions_BN = lengths_B[:, None] + buffers.depth_N
            mask = self.masks.ragged(lengths_B, end)
        if self.d.position_limit is not None:
            # Rows past the last position can never be published; they only must not index past the table.
            positions_BN = positions_BN.clamp(max=self.d.position_limit - 1)
        hidden_BND, middle_BND = hidden_states_and_middle(
            self.d.model,
            tokens_BN,
            reads_layer=self.d.reads_layer,
            attention_mask=mask,
            position_ids_BT=positions_BN,
            cache=self.cache,
        )
        return hidden_BND, middle_BND, self.d.projection(hidden_BND)

    def _accept(self, tokens_BN: Tensor, logits_BNV: Tensor) -> Acceptance:
        settings, buffers = self.settings, self.d.buffers
        if self.chooser.walks:
            texts = [answer.tokens for answer in self.answers]
            live = [answer.finish_reason is None for answer in self.answers]
            return walk_accept(tokens_BN, logits_BNV, buffers, self.chooser.in_round(texts, live))
        if settings.mode == "typical":
            return typical_accept(
                tokens_BN,
                logits_BNV,
                buffers,
                temperature=settings.temperature,
                epsilon=settings.epsilon,
                alpha=settings.alpha,
            )
        return greedy_accept(tokens_BN, logits_BNV, buffers)

    def _commit(self, paths: list[list[int]], acceptance: Acceptance) -> None:
        """Moves the winning rows behind the prefix in every layer."""
        if len(paths) == 1:
            # The root is in place already; a + 1 rows are committed.
            self.cache.commit(self.lengths[0], paths[0][1:])
            self.lengths[0] += len(paths[0])
            return
        width = max(len(path) for path in paths)
        sources = [[n + row for row in path] for n, path in zip(self.lengths, paths, strict=True)]
        targets = [[n + i for i in range(len(path))] for n, path in zip(self.lengths, paths, strict=True)]
        for source, target in zip(sources, targets, strict=True):
            # Padding moves the root onto itself.
            source.extend([target[0]] * (width - len(source)))
            target.extend([target[0]] * (width - len(target)))
        if sources != targets:
            device = acceptance.winner_B.device
            self.cache.commit_ragged(torch.tensor(sources, device=device), torch.tensor(targets, device=device))
        for b, path in enumerate(paths):
            # A finished row stays where it is; its staged rows are overwritten by the next round's.
            if self.answers[b].finish_reason is None:
                self.lengths[b] += len(path)

    def _publish(self, b: int, row_tokens: list[int], path: list[int]) -> RoundTrace | None:
        """Adds the accepted tokens to the answer, cut at a stop or at the limit."""
        answer = self.answers[b]
        if answer.finish_reason is not None:
            return None
        tokens: list[int] = []
        ended = "exhausted" if self.d.is_leaf[path[-1]] else "mismatch"
        for row in path:
            stops = self.stop.at(answer.before, answer.tokens, row_tokens[row])
            answer.tokens.append(row_tokens[row])
            tokens.append(row_tokens[row])
            if stops or len(answer.tokens) >= answer.limit:
                answer.finish_reason, ended = ("stop", "stop") if stops else ("length", "limit")
                break
        ranks = () if len(tokens) == 1 else self.d.tree.paths[path[len(tokens) - 1] - 1]
        return RoundTrace(tokens[0], ranks, tuple(tokens), len(tokens) - 1, ended)

    def _with_trace(
        self,
        done: list[RoundTrace | None],
        proposals_BJk: Tensor | None,
        rows_BN: list[list[int]],
        acceptance: Acceptance,
    ) -> list[RoundTrace | None]:
        proposals = [[]] * len(done) if proposals_BJk is None else proposals_BJk.tolist()
        targets = acceptance.target_BN.tolist()
        return [
            outcome
            and replace(
                outcome,
                proposals=tuple(map(tuple, proposals[b])),
                tree_tokens=tuple(rows_BN[b]),
                target_tokens=tuple(targets[b]),
            )
            for b, outcome in enumerate(done)
        ]


def _take(here_BD: Tensor, inside_B1: Tensor, before_BD: Tensor | None) -> Tensor:
    """Rows whose last token lies in this chunk of the prompt, the others as they were."""
    return here_BD if before_BD is None else torch.where(inside_B1, here_BD, before_BD)
