"""Medusa heads: K small networks that read the last hidden state and guess the tokens after the next one.

    z_0 = h;  z_{r+1} = z_r + SiLU(W_r z_r + b_r);  logits = U_j z_R          (Medusa, arXiv 2401.10774, section 2.1)

Head j (zero-based) predicts token t+j+2 from the hidden state at t. W and b start at zero, so a new head IS the
backbone's own output projection, bit for bit.

Three projection contracts, named in the checkpoint and never loadable as each other:
`own` (U_j is [V, D]), `shared` (U is the backbone's lm_head) and `reduced` (U_j is [V', D] over a token map).

Heads with `sees: parent` also see the token before the one they guess, x_{t+j+1} (the idea of Hydra, arXiv 2402.05109,
with one token in place of the whole path), and with `reads_layer: m` the hidden state after the backbone's m-th layer.
Only the first block changes:

    z_1 = h + SiLU(W [h; n(h_m); n(E[x_{t+j+1}])] + b)

E is the backbone's input embedding. n brings a row to the root mean square of the hidden states on the training rows,
one stored number: embedding rows are far smaller than hidden states in most models, and would otherwise be ignored.
W is [D, 2D] or [D, 3D] and zero at the start, so that a new head is still the lm_head, bit for bit.
Shape letters: K heads, R blocks, D hidden, V vocabulary, M rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_train.errors import UserError
from medusa_train.modeling.backbone import OutputProjection

Contract = Literal["own", "shared", "reduced"]
Sees = Literal["hidden", "parent"]


@dataclass(frozen=True)
class HeadsConfig:
    """The shape of a set of heads; everything that decides which tensors exist.

    Attributes:
        contract: `own`, `shared` or `reduced`.
        medusa_num_heads: K >= 1.
        medusa_num_layers: R >= 0 residual blocks per head.
        hidden_size: D of the backbone.
        vocab_size: V, rows of the backbone's projection (padding rows counted).
        reduced_vocab_size: V' for `reduced`, else None.
        projection_bias: the heads' projections carry a bias (where the lm_head has one); False for `shared`.
        sees: `hidden` (plain Medusa) or `parent` (the token before the one that is guessed, too).
        reads_layer: m >= 1, the hidden state after the backbone's m-th layer is read too; None: it is not.
    """

    contract: Contract
    medusa_num_heads: int
    medusa_num_layers: int
    hidden_size: int
    vocab_size: int
    reduced_vocab_size: int | None = None
    projection_bias: bool = False
    sees: Sees = "hidden"
    reads_layer: int | None = None

    def __post_init__(self) -> None:
        if self.contract not in get_args(Contract):
            raise UserError(f"unknown head contract {self.contract!r}", allowed=", ".join(get_args(Contract)))
        if self.sees not in get_args(Sees):
            raise UserError(f"heads that see {self.sees!r}", allowed=", ".join(get_args(Sees)))
        if self.reads_layer is not None and (self.sees == "hidden" or self.reads_layer < 1):
            raise UserError(
                f"reads_layer is {self.reads_layer} with sees {self.sees!r}",
                allowed="a layer's number, from 1, with `sees: parent`",
            )
        if self.sees == "parent" and self.medusa_num_layers < 1:
            raise UserError(
                "heads that see the parent read it in their first block: medusa_num_layers must be 1 or more"
            )
        for name, least in (
            ("medusa_num_heads", 1),
            ("medusa_num_layers", 0),
            ("hidden_size", 1),
            ("vocab_size", 2),
        ):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}", allowed=f"{least} or more")
        if (self.reduced_vocab_size is not None) != (self.contract == "reduced"):
            raise UserError(
                f"reduced_vocab_size is {self.reduced_vocab_size} with contract {self.contract!r}",
                allowed="a number with `reduced`, nothing with `own` and `shared`",
            )
        if self.reduced_vocab_size is not None and not 0 < self.reduced_vocab_size <= self.vocab_size:
            raise UserError(f"reduced_vocab_size is {self.reduced_vocab_size}", allowed=f"1..{self.vocab_size}")
        if self.contract == "shared" and self.projection_bias:
            raise UserError("shared heads have no projection of their own, so no projection bias either")

    @property
    def offsets(self) -> tuple[int, ...]:
        """Per head, how far ahead of the hidden state its token lies: j + 2."""
        return tuple(j + 2 for j in range(self.medusa_num_heads))

    @property
    def projection_rows(self) -> int:
        """Rows of each head's logits: V, or V' for `reduced`."""
        return self.reduced_vocab_size if self.reduced_vocab_size is not None else self.vocab_size

    @property
    def block_inputs(self) -> int:
        """How many rows of width D the first block reads: 1 (h), 2 (and the parent), 3 (and the middle layer)."""
        return 1 + (self.sees == "parent") + (self.reads_layer is not None)

    def block_parameters(self) -> int:
        """Numbers in all blocks: K R (D^2 + D), and K D^2 for every further input of the first block."""
        size = self.hidden_size
        plain = self.medusa_num_layers * (size**2 + size)
        return self.medusa_num_heads * (plain + (self.block_inputs - 1) * size**2)

    def parameter_count(self) -> int:
        """Trainable numbers: the blocks', plus K rows D (and biases) where projections are the heads' own."""
        blocks = self.block_parameters()
        if self.contract == "shared":
            return blocks
        return blocks + self.medusa_num_heads * self.projection_rows * (self.hidden_size + int(self.projection_bias))

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, for JSON."""
        return asdict(self)


class ResidualBlock(nn.Module):
    """x + SiLU(W [x; others] + b), W and b zero at the start: the identity exactly."""

    def __init__(self, hidden_size: int, inputs: int = 1, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs * hidden_size, hidden_size, bias=True, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to the identity."""
        if self.linear.weight.device.type != "meta":
            nn.init.zeros_(self.linear.weight)
            nn.init.zeros_(self.linear.bias)

    def forward(self, x_MD: Tensor, *others_MD: Tensor) -> Tensor:
        """[..., D] and the other inputs, each [..., D] -> [..., D]."""
        inputs = torch.cat([x_MD, *others_MD], dim=-1) if others_MD else x_MD
        return x_MD + F.silu(self.linear(inputs))


@dataclass(frozen=True)
class Seen:
    """What heads see besides the last hidden state, for M places at once.

    Attributes:
        parent_MD: rows of the backbone's input embedding, of the token before the one that a head guesses, as the
            embedding gives them (heads scale them).
        middle_MD: hidden states after layer `reads_layer` at the place of the last hidden state, or None.
    """

    parent_MD: Tensor
    middle_MD: Tensor | None = None


class MedusaHeads(nn.Module):
    """K heads of one contract.

    State: `blocks.{j}.{r}.linear.*`, `projections.{j}.*`, `token_map` (reduced), `hidden_rms` (sees: parent).
    """

    token_map: Tensor | None
    hidden_rms: Tensor | None

    def __init__(self, config: HeadsConfig, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        # One new block per (head, layer): `[block] * n` would make all layers one block.
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                ResidualBlock(size, config.block_inputs if layer == 0 else 1, device, dtype)
                for layer in range(config.medusa_num_layers)
            )
            for _ in range(config.medusa_num_heads)
        )
        self.projections: nn.ModuleList | None = None
        self.register_buffer("token_map", None)
        self.register_buffer("hidden_rms", None)
        if config.contract != "shared":
            rows = config.projection_rows
            self.projections = nn.ModuleList(
                nn.Linear(size, rows, bias=config.projection_bias, device=device, dtype=dtype)
                for _ in range(config.medusa_num_heads)
            )
        if config.contract == "reduced":
            self.token_map = torch.zeros(config.projection_rows, dtype=torch.int64, device=device)
        if config.sees == "parent":
            self.hidden_rms = torch.ones((), dtype=torch.float32, device=device)

    def features(self, hidden_MD: Tensor, head: int, seen: Seen | None = None) -> Tensor:
        """z_R of head `head`: [..., D] -> [..., D]. `seen` is what heads with `sees: parent` need, None for others."""
        if self.config.sees == "hidden":
            z = hidden_MD
            for block in self.blocks[head]:
                z = block(z)
            return z
        others = [self.scaled(seen.parent_MD)]
        if self.config.reads_layer is not None:
            others.insert(0, self.scaled(seen.middle_MD))
        first, *later = self.blocks[head]
        z = first(hidden_MD, *(other.to(hidden_MD.dtype) for other in others))
        for block in later:
            z = block(z)
        return z

    def scaled(self, rows_MD: Tensor) -> Tensor:
        """n of the formula: rows brought to root mean square `hidden_rms`, in fp32 (a row of zeros stays one)."""
        rows = rows_MD.float()
        rms = rows.square().mean(-1, keepdim=True).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        return rows * (self.hidden_rms / rms)

    def context(self, hidden_MD: Tensor, middle_MD: Tensor | None, head: int) -> Tensor:
        """The part of the first block's sum that no guess changes, W_h h + W_m n(h_m) + b: [..., D].

        A decoding round computes it once for all rows of the tree; `features_below` adds each row's own part.
        """
        linear = self.blocks[head][0].linear
        known = hidden_MD
        if self.config.reads_layer is not None:
            known = torch.cat([hidden_MD, self.scaled(middle_MD).to(hidden_MD.dtype)], dim=-1)
        return F.linear(known, linear.weight[:, : known.shape[-1]], linear.bias)

    def features_below(self, hidden_MD: Tensor, context_MD: Tensor, parent_MD: Tensor, head: int) -> Tensor:
        """z_R below parents whose embedding rows are `parent_MD`: what `features` gives, from a known `context`."""
        linear, size = self.blocks[head][0].linear, self.config.hidden_size
        parent = self.scaled(parent_MD).to(hidden_MD.dtype)
        z = hidden_MD + F.silu(context_MD + F.linear(parent, linear.weight[:, -size:]))
        for block in list(self.blocks[head])[1:]:
            z = block(z)
        return z

    def logits(self, hidden_MD: Tensor, head: int, projection: OutputProjection, seen: Seen | None = None) -> Tensor:
        """Logits of head `head`: [..., V], or [..., V'] in token-map order for `reduced`."""
        return self.project(self.features(hidden_MD, head, seen), head, projection)

    def project(self, features_MD: Tensor, head: int, projection: OutputProjection) -> Tensor:
        """Features to logits through the head's own projection or the backbone's; then its scale and soft-cap."""
        if self.projections is None:
            return projection(features_MD)
        return projection.finish(self.projections[head](features_MD))

    def to_token_ids(self, rows: Tensor) -> Tensor:
        """Indices into a head's logits -> ids of the full vocabulary."""
        return rows if self.token_map is None else self.token_map[rows]


@torch.no_grad()
def new_heads(
    config: HeadsConfig,
    projection: OutputProjection,
    token_map: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> MedusaHeads:
    """Untrained heads that equal the backbone's projection: zero blocks, projections copied from its rows.

    Args:
        token_map: int64 [V'], the tokens a `reduced` head can propose, distinct; None for the other contracts.
        dtype: of the heads' parameters; the projection's by default (float32 where that is quantized).

    Raises:
        UserError: sizes do not fit the backbone, or the token map does not fit the config.
    """
    if (config.hidden_size, config.vocab_size) != (projection.hidden_size, projection.vocab_size):
        raise UserError(
            f"heads for D={config.hidden_size}, V={config.vocab_size} on a backbone with "
            f"D={projection.hidden_size}, V={projection.vocab_size}"
        )
    if (token_map is None) != (config.contract != "reduced"):
        raise UserError("a token map belongs to `reduced` heads, and they need one")
    if token_map is not None:
        _check_token_map(token_map, config)
    weight, bias = dense_projection(projection)
    heads = MedusaHeads(config, device=weight.device, dtype=dtype or weight.dtype)
    if token_map is not None:
        heads.token_map.copy_(token_map)
        weight = weight[heads.token_map]
        bias = None if bias is None else bias[heads.token_map]
    for linear in heads.projections or ():
        linear.weight.copy_(weight)
        if linear.bias is not None:
            linear.bias.zero_() if bias is None else linear.bias.copy_(bias)
    return heads


def _check_token_map(token_map: Tensor, config: HeadsConfig) -> None:
    if token_map.shape != (config.projection_rows,):
        raise UserError(f"token map of shape {tuple(token_map.shape)}", allowed=f"({config.projection_rows},)")
    if token_map.min() < 0 or token_map.max() >= config.vocab_size:
        raise UserError("token map names tokens outside the vocabulary", allowed=f"0..{config.vocab_size - 1}")
    if token_map.unique().numel() != token_map.numel():
        raise UserError("token map names a token twice")


def dense_projection(projection: OutputProjection) -> tuple[Tensor, Tensor | None]:
    """(weight_VD, bias_V or None) of the backbone's projection as floating-point tensors, dequantized if need be."""
    weight = projection.weight
    if not weight.dtype.is_floating_point or getattr(weight, "quant_state", None) is not None:
        # A quantized lm_head gives its rows back exactly through its own forward on the unit vectors.
        eye = torch.eye(projection.hidden_size, device=weight.device, dtype=torch.float32)
        module = projection.module
        module = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        bias = projection.bias
        columns = module(eye).float()
        weight = (columns if bias is None else columns - bias.float()).T.contiguous()
    bias = projection.bias
    return weight.detach(), None if bias is None else bias.detach()
