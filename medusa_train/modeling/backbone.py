"""The stock transformers model seen as two parts: the decoder that makes hidden states, and the projection to logits.

Heads read the decoder's last hidden state (after the final norm). Nothing of a model is copied or patched: position
ids, masks and caches are arguments of its own forward.

Shape letters: B batch, T positions, D hidden, V vocabulary, M any number of rows.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.errors import UserError
from medusa_train.modeling.versions import CACHE_ARGUMENT


def plain_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a peft wrapper (adapters stay in place), or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_of(model: nn.Module) -> nn.Module:
    """The decoder without its output projection; adapters injected by peft are inside it."""
    return plain_model(model).get_decoder()


def input_embeddings(model: nn.Module) -> nn.Module:
    """The module that turns token ids into the decoder's input rows (adapters and scales that it carries included)."""
    return plain_model(model).get_input_embeddings()


def check_layer(model: nn.Module, layer: int) -> nn.Module:
    """The decoder's `layer`-th block, counted from 1.

    Raises:
        UserError: the decoder has no such block, or does not keep its blocks as `layers` (or `h`, GPT-2's name).
    """
    decoder = decoder_of(model)
    blocks = getattr(decoder, "layers", None)
    blocks = getattr(decoder, "h", None) if blocks is None else blocks
    if blocks is None:
        raise UserError(
            f"{type(decoder).__name__} keeps no list of layers, so heads.reads_layer cannot be had",
            fix="leave heads.reads_layer out",
        )
    if not 1 <= layer <= len(blocks):
        raise UserError(f"heads.reads_layer is {layer}", allowed=f"1..{len(blocks)}, the layers of this backbone")
    return blocks[layer - 1]


def hidden_states_and_middle(
    model: nn.Module, input_ids_BT: Tensor, *, reads_layer: int | None, **arguments: Any
) -> tuple[Tensor, Tensor | None]:
    """(hidden_BTD after the final norm, hidden_BTD after layer `reads_layer` or None), from one forward.

    Only that one layer's output is kept: `output_hidden_states` would keep all of them.
    """
    if reads_layer is None:
        return hidden_states(model, input_ids_BT, **arguments), None
    kept: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)

    handle = check_layer(model, reads_layer).register_forward_hook(keep)
    try:
        hidden_BTD = hidden_states(model, input_ids_BT, **arguments)
    finally:
        handle.remove()
    return hidden_BTD, kept[0]


def hidden_states(
    model: nn.Module,
    input_ids_BT: Tensor,
    *,
    attention_mask: Any = None,
    position_ids_BT: Tensor | None = None,
    cache: Any = None,
) -> Tensor:
    """hidden_BTD after the final norm. The lm_head is not run.

    Args:
        attention_mask: what the model's own forward takes: None (causal), 2-D, 4-D, or a dict of 4-D by layer type;
            or what `masks.packed_attention_mask` gives (document ids, for flex and flash attention).
        cache: a transformers Cache that is read and extended in place, or None.
    """
    from medusa_train.modeling.masks import DOCUMENTS, document_arguments

    attention = {"attention_mask": attention_mask}
    if isinstance(attention_mask, dict) and DOCUMENTS in attention_mask:
        attention = document_arguments(model, attention_mask[DOCUMENTS], position_ids_BT)
    output = decoder_of(model)(
        input_ids=input_ids_BT,
        position_ids=position_ids_BT,
        use_cache=cache is not None,
        **{CACHE_ARGUMENT: cache},
        **attention,
    )
    return output.last_hidden_state


@dataclass(frozen=True)
class OutputProjection:
    """How a backbone turns a hidden row into logits: lm_head, then a scale, then a soft-cap.

    Attributes:
        module: the lm_head itself (tied, quantized or carrying an adapter: whatever the model has).
        scale: factor on the raw logits (Cohere's logit_scale, 1/logits_scaling of Granite), 1.0 for most.
        softcap: c of c * tanh(x / c) (Gemma 2), or None.
        valid_vocab_size: rows of the tokenizer; rows past it are padding of the weight and are never proposed.
    """

    module: nn.Module
    scale: float = 1.0
    softcap: float | None = None
    valid_vocab_size: int | None = None

    @property
    def weight(self) -> Tensor:
        """[V, D]; for a peft-wrapped lm_head the wrapped layer's own weight, without the adapter."""
        return _unwrapped(self.module).weight

    @property
    def bias(self) -> Tensor | None:
        """[V] or None."""
        return getattr(_unwrapped(self.module), "bias", None)

    @property
    def vocab_size(self) -> int:
        """V, rows of the projection (padding rows counted)."""
        return _unwrapped(self.module).out_features

    @property
    def hidden_size(self) -> int:
        """D."""
        return _unwrapped(self.module).in_features

    @property
    def is_plain(self) -> bool:
        """True where logits are exactly `hidden @ weight.T + bias`, adapter-free and unquantized."""
        return type(self.module) is nn.Linear and self.weight.dtype.is_floating_point

    def finish(self, raw_logits: Tensor) -> Tensor:
        """Applies scale and soft-cap to raw logits (any shape)."""
        logits = raw_logits if self.scale == 1.0 else raw_logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def __call__(self, hidden_MD: Tensor) -> Tensor:
        """logits_MV as the backbone itself computes them."""
        return self.finish(self.module(hidden_MD))


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def output_projection(model: nn.Module, valid_vocab_size: int | None = None) -> OutputProjection:
    """The output projection of `model`.

    Raises:
        UserError: the model has no lm_head (it is no causal language model).
    """
    inner = plain_model(model)
    lm_head = inner.get_output_embeddings()
    if lm_head is None:
        raise UserError(
            f"{type(inner).__name__} has no output projection (lm_head)",
            fix="name a causal language model, for example one that AutoModelForCausalLM loads",
        )
    config = inner.config.get_text_config(decoder=True)
    scale = 1.0
    if getattr(config, "logit_scale", None) is not None:
        scale = float(config.logit_scale)
    elif getattr(config, "logits_scaling", None) is not None:
        scale = 1.0 / float(config.logits_scaling)
    softcap = getattr(config, "final_logit_softcapping", None)
    return OutputProjection(lm_head, scale, None if softcap is None else float(softcap), valid_vocab_size)


# Decoders that take every argument that a tree needs and are wrong with it in silence: why. tests/decoding and
# scripts/sweep_families.py hold decoding against generate.
INEXACT = {"gpt_neo": "its local attention counts slots of the cache, not positions"}


def check_supported(model: nn.Module) -> None:
    """Refuses, by name and with the reason, a backbone that Medusa decoding cannot be exact on.

    The last check runs three tokens: logits must equal `output_projection(hidden)`, so that a family that does
    something unknown to its logits is found here and not as a head that accepts nothing.
    """
    inner = plain_model(model)
    name = type(inner).__name__
    if getattr(inner.config, "is_encoder_decoder", False):
        raise UserError(f"{name} is an encoder-decoder; Medusa heads need a decoder-only model")
    if getattr(inner, "_is_stateful", False):
        raise UserError(
            f"{name} keeps a recurrent state, which a tree of guesses cannot fork and roll back",
            fix="use an attention-only model (Llama, Mistral, Qwen, Gemma, Phi, GPT-NeoX, GPT-2, ...)",
        )
    text = inner.config.get_text_config(decoder=True)
    if text.model_type in INEXACT:
        raise UserError(f"{name} is not known to decode exactly: {INEXACT[text.model_type]}")
    if getattr(text, "alibi", False):
        raise UserError(f"{name} has ALiBi positions, which follow slots, not tree depth")
    try:
        decoder = decoder_of(inner)
    except Exception as error:
        raise _cannot_run(name, error) from error
    parameters = inspect.signature(decoder.forward).parameters
    for needed in ("position_ids", "attention_mask", "cache"):
        if needed not in parameters and "kwargs" not in parameters:
            raise UserError(f"{name}'s forward takes no {needed}, which tree verification needs")
    if "position_ids" not in parameters:
        raise UserError(f"{name} takes no position_ids (ALiBi-like positions follow slots, not tree depth)")
    projection = output_projection(inner)
    _check_logits_follow(inner, projection, name)


def _cannot_run(name: str, error: Exception) -> UserError:
    said = " ".join(str(error).split())[:200]
    return UserError(
        f"{name} cannot be run as a decoder and an lm_head: {type(error).__name__}: {said}",
        fix="use a decoder-only model of another family (Llama, Mistral, Qwen, Gemma, Phi, GPT-NeoX, GPT-2, ...)",
    )


def _not_finite(model: nn.Module, name: str) -> UserError:
    for tensor_name, tensor in model.named_parameters():
        if tensor.dtype.is_floating_point and not tensor.isfinite().all():
            return UserError(
                f"{name}: a weight holds NaN or infinity", where=tensor_name, fix="download or convert the base again"
            )
    return UserError(
        f"{name}: its logits are not finite in {model.dtype}, though its weights are", fix="load it with dtype float32"
    )


@torch.no_grad()
def _check_logits_follow(model: nn.Module, projection: OutputProjection, name: str) -> None:
    was_training = model.training
    model.eval()
    try:
        device = projection.weight.device
        if device.type == "meta":
            return
        ids_BT = torch.tensor([[1, 2, 3]], device=device) % projection.vocab_size
        expected = model(input_ids=ids_BT, use_cache=False).logits.float()
        found = projection(hidden_states(model, ids_BT)).float()
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _cannot_run(name, error) from error
    finally:
        model.train(was_training)
    if not expected.isfinite().all():
        raise _not_finite(model, name)
    tolerance = 1e-4 if projection.weight.dtype == torch.float32 else 5e-2
    if expected.shape != found.shape or not torch.allclose(expected, found, rtol=tolerance, atol=tolerance):
        worst = (expected - found).abs().max().item() if expected.shape == found.shape else float("nan")
        raise UserError(
            f"{name}: its logits are not lm_head, scale and soft-cap of its last hidden state "
            f"(largest difference {worst:.3g}), so heads trained on that state would not fit"
        )
