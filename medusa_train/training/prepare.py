"""From a recipe to what a Trainer is built from: rows, heads, backbone, objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa_train.config.recipe import Recipe
from medusa_train.console import human_count, say
from medusa_train.dataset.rows import TokenRow
from medusa_train.errors import UserError
from medusa_train.modeling.backbone import OutputProjection, check_layer, input_embeddings, output_projection
from medusa_train.modeling.heads import HeadsConfig, MedusaHeads, new_heads
from medusa_train.training.cache import run_rows
from medusa_train.training.fused import FusedOptions
from medusa_train.training.liger import check_liger, liger_available
from medusa_train.training.losses import inverse_token_map
from medusa_train.training.trainee import Objective


@dataclass(frozen=True)
class Rows:
    """Rows of a run and the hash of the manifest they came with."""

    train: list[TokenRow]
    heldout: list[TokenRow]
    manifest_hash: str | None


def load_training_rows(recipe: Recipe, base: Any) -> Rows:
    """Reads, renders and splits the rows; says how many there are and how many were dropped, by reason."""
    from medusa_train.training.rowsource import read_rows, split

    data = recipe.data
    train, manifest_hash = read_rows(data.train, base, data)
    if data.heldout:
        heldout, _ = read_rows(data.heldout, base, data)
    else:
        train, heldout = split(train, data.heldout_fraction, data.split_seed)
    limit = recipe.evaluation.max_rows
    heldout = heldout[:limit] if limit is not None else heldout
    if not train:
        raise UserError("no rows to train on", where=", ".join(data.train))
    tokens = sum(int(np.asarray(row.loss_mask).sum()) for row in train)
    say(f"{len(train)} rows to train on ({human_count(tokens)} supervised tokens), {len(heldout)} held out")
    return Rows(train, heldout, manifest_hash)


def frequent_tokens(rows: Sequence[TokenRow], size: int, vocab_size: int) -> tuple[Tensor, float]:
    """(token map int64 [V'], coverage): the `size` most frequent supervised tokens (ties by id), ascending."""
    supervised = [np.asarray(row.input_ids)[np.asarray(row.loss_mask).astype(bool)] for row in rows]
    counts_V = np.bincount(np.concatenate(supervised), minlength=vocab_size)
    order = np.lexsort((np.arange(vocab_size), -counts_V))[:size]
    coverage = float(counts_V[order].sum() / max(counts_V.sum(), 1))
    return torch.from_numpy(np.sort(order)), coverage


def make_heads(recipe: Recipe, base: Any, rows: Sequence[TokenRow]) -> MedusaHeads:
    """Heads to train, in fp32 (master weights): new ones, or those of `policy.init_from`."""
    projection = output_projection(base.model)
    config = HeadsConfig(
        contract=recipe.heads.contract,
        medusa_num_heads=recipe.heads.medusa_num_heads,
        medusa_num_layers=recipe.heads.medusa_num_layers,
        hidden_size=projection.hidden_size,
        vocab_size=projection.vocab_size,
        reduced_vocab_size=recipe.heads.reduced_vocab_size,
        projection_bias=recipe.heads.contract != "shared" and projection.bias is not None,
        sees=recipe.heads.sees,
        reads_layer=recipe.heads.reads_layer,
    )
    if config.reads_layer is not None:
        check_layer(base.model, config.reads_layer)
    if recipe.policy.init_from is not None:
        return _heads_of(recipe.policy.init_from, config, base)
    token_map = None
    if config.contract == "reduced":
        token_map, coverage = frequent_tokens(rows, config.reduced_vocab_size, config.vocab_size)
        say(f"reduced heads: {config.reduced_vocab_size} tokens, {coverage:.2%} of the supervised tokens covered")
    heads = new_heads(config, projection, token_map, dtype=torch.float32)
    if heads.hidden_rms is not None:
        heads.hidden_rms.fill_(hidden_rms(base.model, rows))
    return heads


# Positions that the root mean square is taken over: it moves by less than one in a thousand with more.
RMS_POSITIONS = 8192


@torch.no_grad()
def hidden_rms(model: torch.nn.Module, rows: Sequence[TokenRow]) -> float:
    """Root mean square of the hidden states at supervised positions, over the first rows of the training data."""
    squares, numbers = 0.0, 0
    for row in rows:
        hidden_TD = run_rows(model, [row])[0]
        mask_T = torch.from_numpy(np.asarray(row.loss_mask).astype(bool)).to(hidden_TD.device)
        chosen_MD = hidden_TD[mask_T].double()
        squares, numbers = squares + float(chosen_MD.square().sum()), numbers + chosen_MD.numel()
        if numbers >= RMS_POSITIONS * hidden_TD.shape[1]:
            break
    return (squares / max(numbers, 1)) ** 0.5


def _heads_of(folder: str, config: HeadsConfig, base: Any) -> MedusaHeads:
    from medusa_train.checkpoint.load import load_checkpoint

    heads = load_checkpoint(folder, base).heads
    if heads.config != config:
        wanted, found = config.to_dict(), heads.config.to_dict()
        differing = [
            f"{key} {found[key]} there, {wanted[key]} in the recipe" for key in wanted if wanted[key] != found[key]
        ]
        raise UserError(
            "policy.init_from holds other heads: " + "; ".join(differing), where=folder, fix="make heads: match it"
        )
    trained = MedusaHeads(config, dtype=torch.float32)
    trained.load_state_dict(
        {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in heads.state_dict().items()}
    )
    return trained.to(next(base.model.parameters()).device)


def objective_of(recipe: Recipe, device: torch.device) -> Objective:
    """Which channels, and which implementation of the loss works here."""
    loss = recipe.loss
    implementation = loss.implementation
    if implementation == "auto":
        implementation = "liger" if device.type == "cuda" and liger_available() else "fused"
    elif implementation == "liger":
        check_liger()
    options = FusedOptions(chunk_rows=loss.chunk_rows, accuracy_stride=loss.accuracy_stride)
    return Objective(recipe.policy.kind, recipe.heads.medusa_num_heads, implementation, options)


def inverse_map_of(heads: MedusaHeads, projection: OutputProjection) -> Tensor | None:
    """token id -> row of the heads' projection, on the CPU where labels are made; None for full vocabularies."""
    if heads.token_map is None:
        return None
    return inverse_token_map(heads.token_map.cpu(), projection.vocab_size)


def set_backbone_aside(base: Any, embedding_too: bool = False) -> None:
    """Lets go of what training from cached hidden states does not need: all weights but the output projection, and the
    input embedding where heads see tokens.

    A quantized backbone stays: its layers keep more than their parameters where they are.
    """
    if base.quantization is not None:
        return
    needed = {id(parameter) for parameter in output_projection(base.model).module.parameters()}
    if embedding_too:
        needed |= {id(parameter) for parameter in input_embeddings(base.model).parameters()}
    for module in base.model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in needed:
                setattr(module, name, torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=False))
