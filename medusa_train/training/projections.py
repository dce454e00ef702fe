"""A backbone's output projection as the losses take it: products, bias, scale and soft-cap, of some rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa_train.modeling.backbone import OutputProjection
from medusa_train.training.fused import Projection


def projection_of(projection: OutputProjection, rows_MD: Tensor) -> Projection:
    """The backbone's output projection of some rows, an adapter on the lm_head kept as a second, low-rank product."""
    module = projection.module
    bias = projection.bias
    if not hasattr(module, "get_base_layer"):
        return Projection(((rows_MD, _weight_of(module)),), bias, projection.scale, projection.softcap)
    products = [(rows_MD, _weight_of(module.get_base_layer()))]
    if not module.disable_adapters:
        for name in module.active_adapters:
            if name in module.lora_A:
                dropped = module.lora_dropout[name](rows_MD)
                narrow_Mr = nn.functional.linear(dropped, module.lora_A[name].weight.to(rows_MD.dtype))
                products.append((narrow_Mr * module.scaling[name], module.lora_B[name].weight))
    return Projection(tuple(products), bias, projection.scale, projection.softcap)


def _weight_of(linear: nn.Module) -> Tensor:
    """[V, D] in floating point; a quantized lm_head is dequantized for this use."""
    weight = linear.weight
    if weight.dtype.is_floating_point and getattr(weight, "quant_state", None) is None:
        return weight
    from medusa_train.modeling.heads import dense_projection

    return dense_projection(OutputProjection(linear))[0]


def dense_logits(projection: Projection) -> Tensor:
    """The logits of a `Projection`, all of them: [M, V] fp32."""
    total, *others = (x.float() @ w.to(x.dtype).float().T for x, w in projection.products)
    for other in others:
        total = total + other
    if projection.bias is not None:
        total = total + projection.bias.to(projection.products[0][0].dtype).float()
    if projection.scale != 1.0:
        total = total * projection.scale
    if projection.softcap is not None:
        total = torch.tanh(total / projection.softcap) * projection.softcap
    return total


def in_fp32(projection: Projection) -> Projection:
    """The same logits from fp32 tensors that hold what the products' dtype holds: one cast for many `dense_logits`."""
    products = tuple((x.float(), w.to(x.dtype).float()) for x, w in projection.products)
    bias = projection.bias
    if bias is not None:
        bias = bias.to(projection.products[0][0].dtype).float()
    return Projection(products, bias, projection.scale, projection.softcap)
