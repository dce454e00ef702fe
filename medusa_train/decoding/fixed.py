"""The round's forward with shapes and addresses that never change, so that it can be recorded once and replayed.

On CUDA a small model's round is bound by launching kernels, not by running them: a CUDA graph launches all of them at
once. torch.compile fuses them as well, after a compilation of minutes. Both need fixed shapes: tokens, positions and
slots are written into buffers, and attention runs over a bucket of slots whose unused part the mask hides. Plain
decoding (one row) goes the same way, so that it stays an honest baseline.

Without a graph the same code runs eagerly, on any device; that is how it is tested where there is no GPU.

Shape letters: N tree rows, S slots of the bucket, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from medusa_train.console import say
from medusa_train.decoding.cache import PreallocatedCache
from medusa_train.decoding.masks import TreeMasks
from medusa_train.errors import unknown_name
from medusa_train.modeling.backbone import hidden_states_and_middle

if TYPE_CHECKING:
    from medusa_train.decoding.decode import TreeDecoder

Launch = Literal["auto", "eager", "fixed", "graph", "compile"]
BUCKET = 256
WARM_UPS = 3


def resolve_launch(launch: str, device: torch.device) -> Launch:
    """`auto` is `graph` on CUDA and `eager` elsewhere (a CPU gains nothing from fixed shapes).

    Raises:
        UserError: no such way, or a graph on a device that has none.
    """
    if launch not in get_args(Launch):
        raise unknown_name("launch", launch, get_args(Launch))
    if launch == "auto":
        return "graph" if device.type == "cuda" else "eager"
    if launch == "graph" and device.type != "cuda":
        raise unknown_name(f"launch on {device.type}", launch, ("auto", "eager", "fixed", "compile"))
    return launch


class FixedForward:
    """The forward of one tree over one bucket of slots of one cache.

    Args:
        launch: `fixed` (eager), `graph` (CUDA) or `compile`.
        bucket: slots that attention reads; a multiple of BUCKET, within the cache's capacity.
        may_fall_back: a forward that cannot be recorded runs eagerly, with a note, instead of failing.
    """

    def __init__(
        self,
        decoder: TreeDecoder,
        cache: PreallocatedCache,
        masks: TreeMasks,
        bucket: int,
        launch: Launch,
        may_fall_back: bool,
    ) -> None:
        self._decoder, self._cache, self._masks, self.bucket = decoder, cache, masks, bucket
        self._may_fall_back = may_fall_back
        buffers, device = decoder.buffers, decoder.device
        rows = buffers.num_rows
        self._order_N = torch.arange(rows, device=device)
        self._tokens_1N = torch.zeros(1, rows, dtype=torch.int64, device=device)
        self._positions_1N = torch.zeros(1, rows, dtype=torch.int64, device=device)
        self._slots_N = torch.zeros(rows, dtype=torch.int64, device=device)
        self._mask = _copied(masks.view(0, bucket))
        self._graph: Any = None
        self._outputs: tuple[Tensor, Tensor | None, Tensor] | None = None
        self._run: Callable[[], tuple[Tensor, Tensor | None, Tensor]] = self._forward
        self._launch = launch
        if launch == "compile":
            self._run = torch.compile(self._forward, dynamic=False)

    def _forward(self) -> tuple[Tensor, Tensor | None, Tensor]:
        hidden_1ND, middle_1ND = hidden_states_and_middle(
            self._decoder.model,
            self._tokens_1N,
            reads_layer=self._decoder.reads_layer,
            attention_mask=self._mask,
            position_ids_BT=self._positions_1N,
            cache=self._cache,
        )
        return hidden_1ND, middle_1ND, self._decoder.projection(hidden_1ND)

    def __call__(self, tokens_1N: Tensor, length: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """(hidden_1ND, middle_1ND or None, logits_1NV) of the tree's rows behind `length` committed slots.

        With a graph the results are the graph's own buffers: valid until the next call.
        """
        limit, depth_N = self._decoder.position_limit, self._decoder.buffers.depth_N
        self._tokens_1N.copy_(tokens_1N)
        torch.add(depth_N, length, out=self._positions_1N[0])
        if limit is not None:
            self._positions_1N.clamp_(max=limit - 1)
        torch.add(self._order_N, length, out=self._slots_N)
        _fill(self._mask, self._masks.view(length, self.bucket))
        self._cache.stage_fixed(self._slots_N, self.bucket)
        if self._launch != "graph":
            return self._run()
        if self._graph is None:
            # A capture goes to the current device, which need not be the model's.
            with torch.cuda.device(self._decoder.device):
                self._record()
        if self._graph is None:
            return self._run()
        with torch.cuda.device(self._decoder.device):
            self._graph.replay()
        return self._outputs

    def _record(self) -> None:
        # Warmed up on a side stream, as capture demands; the rows it stages are staged again by the replay.
        side = torch.cuda.Stream(self._decoder.device)
        side.wait_stream(torch.cuda.current_stream(self._decoder.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._forward()
        torch.cuda.current_stream(self._decoder.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: another thread's work on the device (a server's, say) must not break the capture.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._outputs = self._forward()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # Some families wait for the device inside their forward (routing of experts, say).
            if not self._may_fall_back:
                raise
            say(f"note: this model's forward cannot be recorded as a CUDA graph, it runs eagerly ({error})")
            self._launch = "fixed"
            return
        self._graph = graph


class FixedForwards:
    """One FixedForward for each bucket of the cache in use."""

    def __init__(self, decoder: TreeDecoder, launch: Launch, may_fall_back: bool = False) -> None:
        self._decoder, self._launch, self._may_fall_back = decoder, launch, may_fall_back
        self._cache: PreallocatedCache | None = None
        self._by_bucket: dict[int, FixedForward] = {}

    def __call__(
        self, cache: PreallocatedCache, masks: TreeMasks, tokens_1N: Tensor, length: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """See FixedForward; the smallest bucket that holds the prefix and the tree."""
        if cache is not self._cache:
            self._cache, self._by_bucket = cache, {}
        need = length + tokens_1N.shape[1]
        bucket = min(cache.capacity, -(-need // BUCKET) * BUCKET)
        if bucket not in self._by_bucket:
            self._by_bucket[bucket] = FixedForward(
                self._decoder, cache, masks, bucket, self._launch, self._may_fall_back
            )
        return self._by_bucket[bucket](tokens_1N, length)


def _copied(mask: Any) -> Any:
    if isinstance(mask, dict):
        return {kind: one.contiguous().clone() for kind, one in mask.items()}
    return mask.contiguous().clone()


def _fill(target: Any, source: Any) -> None:
    if isinstance(target, dict):
        for kind, one in target.items():
            one.copy_(source[kind])
    else:
        target.copy_(source)
