"""How many bytes of logits live at once: storages are counted from their making to their end, not tensors by size."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medusa_train.modeling.backbone import OutputProjection
from medusa_train.modeling.heads import HeadsConfig, new_heads
from medusa_train.training import softmax
from medusa_train.training.fused import FusedOptions, Projection, fused_cross_entropy, fused_kl
from medusa_train.training.trainee import Objective, Trainee

# D is small and V large, so that everything but logits and weights' gradients is small beside a chunk of logits.
ROWS, SIZE, VOCABULARY, CHUNK = 256, 4, 4000, 32
ONE_CHUNK = CHUNK * VOCABULARY  # numbers
ONE_WEIGHT = VOCABULARY * SIZE  # an eighth of a chunk
# Rows, features, their gradients, labels: at most 6 tensors of [ROWS, SIZE] fp32 for each head.
SMALL = 6 * ROWS * SIZE * 4
ROW_OF_SCRATCH = VOCABULARY * 4  # the softmax's blocks have one row in these tests


class Living(TorchDispatchMode):
    """Bytes of all storages made inside the mode and not freed yet, and their peak; views add nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, int] = {}

    def _freed(self, key: int) -> None:
        self.now -= self.known.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {value.untyped_storage()._cdata for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self.known:
                    self.known[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, key)
        self.peak = max(self.peak, self.now)
        return result


def peak_of(work: Callable[[], Tensor]) -> int:
    """Peak of living bytes over `work` and the backward of what it returns."""
    with Living() as living:
        work().backward()
    return living.peak


@pytest.fixture(autouse=True)
def softmax_blocks_of_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The softmax's scratch is then one row of logits for each tensor of it, whatever the cores are."""
    monkeypatch.setattr(softmax, "CPU_BLOCK_NUMBERS", VOCABULARY)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


def test_the_meter_counts_what_lives_and_not_what_was_freed_or_is_a_view() -> None:
    """Ten clones of 4,000 bytes one after the other: one at a time, or ten where they are kept."""
    x, kept = torch.zeros(1000), []
    with Living() as freed:
        for _ in range(10):
            x.clone().view(10, 100)[3:].add_(1)
    with Living() as retained:
        for _ in range(10):
            kept.append(x.clone()[:1])
    assert (freed.peak, freed.now, retained.peak) == (4000, 0, 40_000)
    kept.clear()
    assert retained.now == 0


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_chunk_of_cross_entropy_s_logits_lives(softcap: float | None, dtype: torch.dtype) -> None:
    """Beside it: the weight's fp32 gradient, its summand and its copy in the rows' dtype; three rows of scratch."""
    x, w = leaf(ROWS, SIZE, dtype=dtype), leaf(VOCABULARY, SIZE)
    labels = torch.zeros(ROWS, dtype=torch.int64)

    def work() -> Tensor:
        return fused_cross_entropy(Projection(((x, w),), None, 1.0, softcap), labels, FusedOptions(CHUNK, 16))[0].sum

    assert peak_of(work) <= ONE_CHUNK * dtype.itemsize + 2.5 * ONE_WEIGHT * 4 + 3 * ROW_OF_SCRATCH + SMALL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_chunk_of_each_side_of_kl_lives(dtype: torch.dtype) -> None:
    """Beside the two: as above with a second weight's copy, five rows of scratch (of both sides)."""
    x, w, taught = leaf(ROWS, SIZE, dtype=dtype), leaf(VOCABULARY, SIZE), leaf(ROWS, SIZE, dtype=dtype).detach()
    labels, teacher = torch.zeros(ROWS, dtype=torch.int64), Projection(((taught, w.detach() * 0.5),), None, 1.0, 5.0)

    def work() -> Tensor:
        return fused_kl(teacher, Projection(((x, w),), None, 1.0, 5.0), labels, FusedOptions(CHUNK)).sum

    assert peak_of(work) <= 2 * ONE_CHUNK * dtype.itemsize + 3 * ONE_WEIGHT * 4 + 5 * ROW_OF_SCRATCH + SMALL


def trainee_peak(contract: str, heads: int, rows: int) -> int:
    """Forward and backward of all heads over `rows` hidden rows, fp32."""
    torch.manual_seed(0)
    base = OutputProjection(nn.Linear(SIZE, VOCABULARY, bias=False).requires_grad_(False))
    made = new_heads(HeadsConfig(contract, heads, 1, SIZE, VOCABULARY), base, dtype=torch.float32)
    trainee = Trainee(made, base, Objective("heads_only", heads, "fused", FusedOptions(CHUNK, 16)), None)
    hidden, labels = torch.randn(rows, SIZE), torch.randint(0, VOCABULARY, (heads, rows))
    return peak_of(lambda: trainee(labels, hidden=hidden)["sums"].sum())


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("rows", [ROWS // 4, ROWS])
def test_a_step_s_peak_is_one_chunk_whatever_the_heads_and_rows_are(heads: int, rows: int) -> None:
    """Shared heads: one chunk and small tensors, no more for three heads than for one. All logits would be 24."""
    assert trainee_peak("shared", heads, rows) <= ONE_CHUNK * 4 + heads * SMALL < 1.2 * ONE_CHUNK * 4


@pytest.mark.parametrize("rows", [ROWS // 4, ROWS])
def test_own_heads_add_their_weights_gradients_and_nothing_else(rows: int) -> None:
    """K weights' gradients and one more that is being summed."""
    assert trainee_peak("own", 3, rows) <= (ONE_CHUNK + 4 * ONE_WEIGHT) * 4 + 3 * SMALL
