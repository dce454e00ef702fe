"""Generation for `distill` on this machine: one batch that is never empty, whatever lengths its rows have.

Waiting prompts are sorted by length. The batch has as many rows as fit the token budget (rows x slots); a row that
ends is replaced by the next prompt as soon as enough rows have ended for their prompts to be worth one prefill. The
beginning that all prompts share (a system prompt) is computed once. The key/value memory is a `Ring`: allocated once,
nothing is concatenated.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache

from medusa_train.dataset.requests import Completion, Request, Row, right_aligned
from medusa_train.dataset.ring import Ring
from medusa_train.dataset.sampling import Decoding, choose, uniforms
from medusa_train.errors import UserError
from medusa_train.modeling.backbone import decoder_of, output_projection
from medusa_train.modeling.masks import attention_windows, per_layer_type
from medusa_train.modeling.versions import CACHE_ARGUMENT

# Tokens of one prefill pass: bounds its activations.
PREFILL_TOKENS = 4096
# The share of rows that must have ended before their places are filled: one prefill costs about as much as two steps.
REFILL_SHARE = 8
# A shared beginning shorter than this is not worth a pass of its own.
MIN_SHARED_PREFIX = 8


class LocalEngine:
    """Decodes requests in one refilled batch.

    Args:
        base: a loaded base (`modeling.base.load_base`).
        stop_token_ids: a row ends after emitting one of these.
        decoding: greedy or sampled.
        batch_tokens: budget of the key/value memory in tokens (rows x slots).
        max_rows: the most rows in one batch.
        on_tokens: called with the number of new tokens after every step.
    """

    def __init__(
        self,
        base,
        *,
        stop_token_ids: Sequence[int],
        decoding: Decoding | None = None,
        batch_tokens: int,
        max_rows: int,
        on_tokens: Callable[[int], None] = lambda count: None,
    ):
        self.decoder, self.project = decoder_of(base.model), output_projection(base.model)
        self.config = base.model.config.get_text_config(decoder=True)
        self.windows = attention_windows(base.model)
        self.device, self.dtype = base.model.device, base.model.dtype
        self.stop = frozenset(int(token) for token in stop_token_ids)
        self.decoding = decoding or Decoding()
        self.batch_tokens, self.max_rows, self.on_tokens = batch_tokens, max_rows, on_tokens
        # Reading a token back waits for the device. On a CPU that is free; on a GPU it is done every few steps, and a
        # row that has ended meanwhile runs on for at most that many tokens, which are cut off.
        self.steps_per_read = 1 if self.device.type == "cpu" else 8
        self.generated = 0
        self._order = itertools.count()
        self._queue: list[tuple[int, int, int, Request]] = []
        self._rows: dict[int, Row] = {}
        self._ring: Ring | None = None
        self._prefix_ids: list[int] = []
        self._prefix_cache: Cache | None = None
        self._prefix_wave: int | None = None

    def submit(self, request: Request) -> None:
        """Queues a request; allowed at any time, also from `on_finish`."""
        if not request.prompt_ids:
            raise UserError("a prompt rendered to no tokens", fix="check the chat template")
        limit = getattr(self.config, "max_position_embeddings", None)
        if limit is not None and len(request.prompt_ids) + request.max_new_tokens > limit:
            raise UserError(
                f"prompt of {len(request.prompt_ids)} + {request.max_new_tokens} new tokens exceed the model's context",
                allowed=f"{limit} positions",
                fix="lower --max-new-tokens or drop the prompt",
            )
        heapq.heappush(self._queue, (request.wave, -len(request.prompt_ids), next(self._order), request))

    @torch.inference_mode()
    def run(self, on_finish: Callable[[Completion], None]) -> None:
        """Generates until nothing waits; `on_finish` may submit further requests."""
        while self._queue or self._rows:
            if self._queue:
                self._resize_for_queue()
                self._admit(on_finish)
            else:
                self._shrink()
            if self._rows:
                self._decode(on_finish)

    # ---- which rows run -------------------------------------------------------------------------------------------

    def _need(self, request: Request) -> int:
        return len(request.prompt_ids) + request.max_new_tokens + self.steps_per_read

    def _plan_rows(self, capacity: int) -> int:
        return max(1, min(self.max_rows, self.batch_tokens // capacity))

    def _resize_for_queue(self) -> None:
        """Grows or re-cuts the ring where the next prompt does not fit it, or where more rows would fit."""
        head_need = self._need(self._queue[0][-1])
        if self._ring is None or not self._rows:
            waiting = len(self._queue)
            rows = min(self._plan_rows(head_need), waiting)
            if self._ring is None or head_need > self._ring.capacity or rows > self._ring.rows:
                self._ring, self._next_capacity, self._next_rows = None, head_need, rows
            return
        ring = self._ring
        active_need = max(row.end_step - row.first_step for row in self._rows.values())
        capacity = max(head_need, active_need)
        rows = self._plan_rows(capacity)
        too_long = head_need > ring.capacity
        roomier = rows >= ring.rows * 1.25 and len(self._queue) + len(self._rows) > ring.rows
        if (too_long or roomier) and len(self._rows) <= rows:
            self._rebuild(min(rows, len(self._rows) + len(self._queue)), capacity)

    def _shrink(self) -> None:
        """Without waiting prompts, drops the places of ended rows once half are empty."""
        if self._ring is not None and 0 < len(self._rows) <= self._ring.rows // 2:
            self._rebuild(len(self._rows), self._ring.capacity)

    def _rebuild(self, rows: int, capacity: int) -> None:
        keep = sorted(self._rows)
        oldest = min(self._rows[index].first_step for index in keep)
        self._ring, moved = self._ring.rebuilt(keep, oldest, rows, capacity)
        self._rows = {new: self._rows[old] for new, old in enumerate(keep)}
        for row in self._rows.values():
            row.first_step -= moved
            row.end_step -= moved

    def _admit(self, on_finish) -> None:
        ring = self._ring
        rows = ring.rows if ring is not None else self._next_rows
        capacity = ring.capacity if ring is not None else self._next_capacity
        free = [index for index in range(rows) if index not in self._rows]
        wanted = min(len(free), len(self._queue))
        if wanted == 0 or (self._rows and wanted < min(max(1, rows // REFILL_SHARE), len(self._queue))):
            return
        while free and self._queue:
            group: list[Request] = []
            longest_new = 0
            while len(group) < len(free) and self._queue:
                request = self._queue[0][-1]
                longest = len(group[0].prompt_ids) if group else len(request.prompt_ids)
                if group and request.wave != group[0].wave:
                    break
                if longest + max(longest_new, request.max_new_tokens) + self.steps_per_read > capacity:
                    break
                # The shared beginning is computed once, so only the rest counts.
                if (longest - self._shared(request)) * (len(group) + 1) > PREFILL_TOKENS and group:
                    break
                longest_new = max(longest_new, request.max_new_tokens)
                group.append(heapq.heappop(self._queue)[-1])
            if not group:
                return
            self._start(group, free[: len(group)], rows, capacity, on_finish)
            free = [index for index in range(rows) if index not in self._rows]

    # ---- prefill --------------------------------------------------------------------------------------------------

    def _shared(self, request: Request) -> int:
        count = len(self._prefix_ids)
        ids = request.prompt_ids
        return count if count and len(ids) > count and list(ids[:count]) == self._prefix_ids else 0

    def _find_prefix(self, group: list[Request]) -> None:
        """Once per wave: computes the beginning that all its prompts share (system prompt and header, mostly)."""
        if self._prefix_wave == group[0].wave:
            return
        self._prefix_wave, self._prefix_ids, self._prefix_cache = group[0].wave, [], None
        waiting = [entry[-1] for entry in self._queue if entry[-1].wave == group[0].wave]
        prompts = [list(request.prompt_ids) for request in group + waiting]
        # Everything between the smallest and the largest in dictionary order shares what those two share.
        first, last = min(prompts), max(prompts)
        count = 0
        while count < min(len(first), len(last)) and first[count] == last[count]:
            count += 1
        count = min(count, min(map(len, prompts)) - 1)
        if count < MIN_SHARED_PREFIX or len(prompts) < 2:
            return
        cache = DynamicCache()
        positions = torch.arange(count, device=self.device)[None]
        ids = torch.tensor([first[:count]], device=self.device)
        self._forward(ids, torch.ones_like(ids, dtype=torch.bool), positions, cache, 0)
        self._prefix_ids, self._prefix_cache = first[:count], cache

    def _start(self, group: list[Request], places: list[int], rows: int, capacity: int, on_finish) -> None:
        self._find_prefix(group)
        shared = len(self._prefix_ids) if all(self._shared(request) for request in group) else 0
        # Samples of one prompt are prefilled once.
        distinct = list(dict.fromkeys(tuple(request.prompt_ids) for request in group))
        place_of = {ids: index for index, ids in enumerate(distinct)}
        which = torch.tensor([place_of[tuple(request.prompt_ids)] for request in group], device=self.device)
        ids, valid, positions = right_aligned(distinct, shared)
        cache = DynamicCache()
        if shared:
            for number, layer in enumerate(self._prefix_cache.layers):
                keys, values = (t.expand(len(distinct), -1, -1, -1) for t in (layer.keys, layer.values))
                cache.update(keys, values, number)
        valid_GS, positions_GS = torch.from_numpy(valid).to(self.device), torch.from_numpy(positions).to(self.device)
        hidden_GTD = self._forward(torch.from_numpy(ids).to(self.device), valid_GS, positions_GS, cache, shared)
        last_GD = hidden_GTD[:, -1]
        if len(distinct) < len(group):
            cache.batch_select_indices(which)
            valid_GS, positions_GS, last_GD = valid_GS[which], positions_GS[which], last_GD[which]
        if self._ring is None:
            self._ring = Ring(cache, rows, capacity, self.dtype)
        for index, request in zip(places, group, strict=True):
            row = Row(request, 0, 0)
            if not self.decoding.greedy:
                row.uniforms = uniforms(request.seed, request.max_new_tokens + self.steps_per_read)
            self._rows[index] = row
        tokens_G = self._choose(last_GD, places, 0)
        self._ring.insert(places, cache, valid_GS, positions_GS, tokens_G)
        step = self._ring.clock.step
        for index, request in zip(places, group, strict=True):
            row = self._rows[index]
            row.first_step = step - valid.shape[1]
            row.end_step = step + request.max_new_tokens + self.steps_per_read
        self._collect(places, tokens_G[None], on_finish)

    def _forward(
        self, ids_GT: torch.Tensor, valid_GS: torch.Tensor, positions_GS: torch.Tensor, cache: Cache, shared: int
    ) -> torch.Tensor:
        """Hidden states of right-aligned prompts; S = shared + T. Padding rows attend everywhere: unread, but
        finite."""
        distance = (positions_GS[:, shared:, None] - positions_GS[:, None, :])[:, None]
        mask = per_layer_type(self.windows, valid_GS[:, None, None] & (distance >= 0), distance, self.dtype)
        return self.decoder(
            input_ids=ids_GT,
            attention_mask=mask,
            position_ids=positions_GS[:, shared:],
            use_cache=True,
            **{CACHE_ARGUMENT: cache},
        ).last_hidden_state

    # ---- decoding -------------------------------------------------------------------------------------------------

    def _decode(self, on_finish) -> None:
        ring, places, read = self._ring, sorted(self._rows), []
        for offset in range(self.steps_per_read):
            ring.open_slot()
            width = ring.window()
            mask = _step_mask(self.windows, ring, width)
            hidden_B1D = self.decoder(
                input_ids=ring.tokens_B1,
                attention_mask=mask,
                position_ids=ring.positions_B1,
                use_cache=True,
                **{CACHE_ARGUMENT: ring.cache},
            ).last_hidden_state
            tokens_B = self._choose(hidden_B1D[:, 0], range(ring.rows), offset)
            ring.advance(tokens_B)
            read.append(tokens_B)
        self._collect(places, torch.stack(read)[:, places], on_finish)

    def _choose(self, hidden_MD: torch.Tensor, places: Sequence[int], offset: int) -> torch.Tensor:
        """The next token of the rows at `places`; `offset` steps after the last token that was read back."""
        logits_MV = self.project(hidden_MD)
        if self.decoding.greedy:
            return choose(logits_MV, self.decoding, None)
        numbers = np.zeros(len(places), dtype=np.float32)
        for index, place in enumerate(places):
            row = self._rows.get(place)
            if row is not None:
                numbers[index] = row.uniforms[min(len(row.token_ids) + offset, len(row.uniforms) - 1)]
        return choose(logits_MV, self.decoding, torch.from_numpy(numbers).to(self.device))

    def _collect(self, places: Sequence[int], tokens_SM: torch.Tensor, on_finish) -> None:
        """Reads S steps' tokens of the rows at `places` and ends the rows that stop."""
        fresh = 0
        for place, tokens in zip(places, tokens_SM.T.tolist(), strict=True):
            row = self._rows[place]
            for token in tokens:
                row.token_ids.append(token)
                fresh += 1
                stopped = token in self.stop
                if stopped or len(row.token_ids) >= row.request.max_new_tokens:
                    del self._rows[place]
                    on_finish(Completion(row.request, row.token_ids, "stop" if stopped else "length"))
                    break
        self.generated += fresh
        self.on_tokens(fresh)


def _step_mask(windows: dict[str, int | None], ring: Ring, width: int):
    """One decode step's mask(s): the ring keeps the full one up to date, so only a window costs anything."""
    full = ring.mask_BC[:, None, None, :width]
    if all(window is None or ring.capacity <= window for window in windows.values()):
        return full
    distance = (ring.positions_B1 - ring.slot_positions_BC[:, :width])[:, None, None]
    return per_layer_type(windows, full == 0, distance, full.dtype)
