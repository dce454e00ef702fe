"""The ledger: parameters, bytes, FLOPs and memory by formula, before anything runs (DESIGN section 4).

2 FLOPs a multiply-add. Shape letters: K heads, R blocks, D hidden, V vocabulary, T_h rows, N tree rows, P prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from medusa_train.modeling.heads import HeadsConfig

FP32, BF16 = 4, 2
# Tokens that a frozen backbone runs at once per CPU thread: more spill out of the caches, fewer leave threads waiting.
CPU_PIECE_TOKENS = 2048
# Of a held-out check: rows scored at once, tokens run through the backbone at once.
CHECK_ROWS, CHECK_TOKENS = 256, 4096


def block_parameters(hidden_size: int) -> int:
    """D^2 + D of one residual block."""
    return hidden_size * hidden_size + hidden_size


def head_flops(config: HeadsConfig, rows: int) -> int:
    """2 K T_h ((R + I - 1) D^2 + V D) of a forward over `rows` rows, V' if reduced; I: inputs of a first block."""
    size = config.hidden_size
    products = config.medusa_num_layers + config.block_inputs - 1  # what heads see besides is read by the first block
    return 2 * config.medusa_num_heads * rows * (products * size * size + config.projection_rows * size)


def head_training_flops(config: HeadsConfig, rows: int) -> int:
    """Forward and backward: three products for own and reduced projections, two for a frozen shared one."""
    size, heads = config.hidden_size, config.medusa_num_heads
    layers, inputs = config.medusa_num_layers, config.block_inputs
    product = 2 * heads * rows * size * size
    projections = 2 * heads * rows * config.projection_rows * size
    # The first block's inputs are frozen: no gradient of rows is needed there.
    block_products = (2 * inputs + 3 * (layers - 1)) * product if layers else 0
    return block_products + projections * (2 if config.contract == "shared" else 3)


def kv_bytes(rows: int, layers: int, kv_heads: int, head_dim: int, bytes_per_number: int) -> int:
    """rows * layers * 2 * H_kv * d_h * bytes: K and V of that many positions (tree rows or committed ones)."""
    return rows * layers * 2 * kv_heads * head_dim * bytes_per_number


def dense_attention_pairs(tree_rows: int, prefix: int) -> int:
    """N (P + N): pairs computed where the mask is dense."""
    return tree_rows * (prefix + tree_rows)


def allowed_attention_pairs(tree_rows: int, prefix: int, mask_sum: int) -> int:
    """N P + sum(tree_mask): pairs that the mask allows."""
    return tree_rows * prefix + mask_sum


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one training step, by what they are for."""

    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


def loss_buffer_bytes(chunk_rows: int, vocabulary: int, compute_bytes: int, on_cpu: bool) -> int:
    """What the fused loss holds besides gradients: one chunk of logits and its fp32 scratch (all of it on a GPU)."""
    scratch = min(chunk_rows * vocabulary, 1 << 19) if on_cpu else chunk_rows * vocabulary
    return chunk_rows * vocabulary * compute_bytes + scratch * FP32
