"""Multi-head attention (Lee & Kifer 2020, section 5.6): four linear layers around scaled dot-product attention.

torch's own module multiplies with packed weights inside one function, where nothing can be captured. The forward here
takes the same steps with the same kernels in the same order, and captures the pre-activation of each projection.
Inside, tensors are [T, B, E], as in torch: examples are in dimension 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules import linear as torch_linear

from ghostclip.errors import UnsupportedModelError
from ghostclip.norms.outer import OuterProduct
from ghostclip.norms.term import PerExampleGrads

from .base import GhostLayer, LayerCall, built_of_wrappers, is_capturing, place_of
from .linear import Linear, examples_first, summed_positions

__all__ = ["MultiheadAttention"]


class NonDynamicallyQuantizableLinear(
    Linear, torch_linear.NonDynamicallyQuantizableLinear, wraps=torch_linear.NonDynamicallyQuantizableLinear
):
    """The output projection of an attention layer: a linear layer under torch's own name for it."""


class MultiheadAttention(GhostLayer, torch.nn.MultiheadAttention, wraps=torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` that can be clipped: masks, kdim, vdim, added biases, weights returned or not."""

    has_parts = True
    __init__ = built_of_wrappers(torch.nn.MultiheadAttention)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's; raises UnsupportedModelError for inputs without a batch dimension while recording gradients."""
        trained = is_capturing() and any(parameter.requires_grad for parameter in self.parameters())
        if trained and query.dim() == 2:
            raise UnsupportedModelError(
                f"{place_of(self)} got a query of shape {list(query.shape)}; give it a batch dimension: [B, T, E] "
                "with batch_first=True, else [T, B, E]"
            )
        hint = is_causal and key_padding_mask is None and not need_weights
        # Where inputs and masks don't fit together, torch says what is wrong.
        fit = attn_mask is not None or not is_causal
        if not (trained and fit and self._fit(query, key, value, key_padding_mask, None if hint else attn_mask)):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        key_padding_mask, attn_mask, is_causal = _masks(query, key_padding_mask, attn_mask, is_causal, need_weights)
        if self.batch_first:
            query, key, value = _transposed(query, key, value)
        projected = self._project(query, key, value)
        heads, attn_mask, key_padding_mask = self._heads(projected, attn_mask, key_padding_mask)
        mask = self._merged_mask(attn_mask, key_padding_mask, query.shape[1], heads[1].shape[2])
        attended, weights = self._attend(heads, mask, query.shape[1], need_weights, is_causal)
        output = F.linear(attended, self.out_proj.weight, self.out_proj.bias)
        if isinstance(self.out_proj, GhostLayer):
            shaped = attended.view(query.shape[0], query.shape[1], self.embed_dim)
            output = self.out_proj.capture(output.view(shaped.shape), shaped, batch_dim=1)
        output = output.view(query.shape[0], query.shape[1], self.embed_dim)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        return (output.transpose(1, 0) if self.batch_first else output), weights

    def _fit(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> bool:
        """Whether inputs and masks have sizes that torch takes."""
        if query.is_nested or (query.dim(), key.dim(), value.dim()) != (3, 3, 3) or key.shape[:2] != value.shape[:2]:
            return False
        batch, steps = (0, 1) if self.batch_first else (1, 0)
        examples, target, source = query.shape[batch], query.shape[steps], key.shape[steps]
        masks = (None, (target, source), (examples * self.num_heads, target, source))
        padding = (None, (examples, source))
        shapes = [None if mask is None else tuple(mask.shape) for mask in (attn_mask, key_padding_mask)]
        return key.shape[batch] == examples and shapes[0] in masks and shapes[1] in padding

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value through their projections, in as few products as torch makes of them."""
        width, packed = self.embed_dim, "in_proj_weight"
        if not self._qkv_same_embed_dim or key is not value:
            separate = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            names = (packed,) * 3 if self._qkv_same_embed_dim else separate
            starts = (0, width, 2 * width)
            q, k, v = (
                self._linear(x, name, start, start + width)
                for x, name, start in zip((query, key, value), names, starts, strict=True)
            )
            return q, k, v
        if query is not key:
            q = self._linear(query, packed, 0, width)
            k, v = _divided(self._linear(key, packed, width, 3 * width), 2)
            return q, k, v
        q, k, v = _divided(self._linear(query, packed, 0, 3 * width), 3)
        return q, k, v

    def _linear(self, input: Tensor, name: str, start: int, stop: int) -> Tensor:
        """``input`` times a weight; start:stop are the rows of the packed bias, and of the packed weight, for it."""
        weight: Tensor = getattr(self, name)
        bias: Tensor | None = self.in_proj_bias
        rows = {}
        if stop - start < 3 * self.embed_dim:
            rows["in_proj_bias"] = start, stop
            bias = None if bias is None else bias[start:stop]
            if name == "in_proj_weight":
                rows[name], weight = (start, stop), weight[start:stop]
        output, input = _product(input, weight, bias)
        return self.capture(output, input, parameters=(name, "in_proj_bias"), rows=rows, batch_dim=1)

    def _heads(
        self, projected: tuple[Tensor, Tensor, Tensor], attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor | None]:
        """[T, B, E] each to [B, heads, T, E / heads]; added positions and the masks' columns for them."""
        q, k, v = projected
        examples = q.shape[1]
        if attn_mask is not None and attn_mask.dim() == 2:
            attn_mask = attn_mask.unsqueeze(0)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self._added(self.bias_k, "bias_k", examples)])
            v = torch.cat([v, self._added(self.bias_v, "bias_v", examples)])
            attn_mask, key_padding_mask = _widened(attn_mask), _widened(key_padding_mask)
        q, k, v = (x.transpose(0, 1).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        if self.add_zero_attn:
            zeros = q.new_zeros(examples, self.num_heads, 1, self.head_dim)
            k, v = (torch.cat([x, zeros], dim=2).contiguous() for x in (k, v))
            attn_mask, key_padding_mask = _widened(attn_mask), _widened(key_padding_mask)
        return (q, k, v), attn_mask, key_padding_mask

    def _added(self, bias: Tensor, name: str, examples: int) -> Tensor:
        """The learned extra key or value position, once for each example."""
        return self.capture(bias.repeat(1, examples, 1), parameters=(name,), batch_dim=1)

    def _merged_mask(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, examples: int, source: int
    ) -> Tensor | None:
        if key_padding_mask is None:
            return attn_mask
        padding = key_padding_mask.view(examples, 1, 1, source).expand(-1, self.num_heads, -1, -1)
        padding = padding.reshape(examples * self.num_heads, 1, source)
        return padding if attn_mask is None else attn_mask + padding

    def _attend(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        examples: int,
        need_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attended values [T * B, E] and, on request, the attention weights [B, heads, T, S]."""
        q, k, v = heads
        dropout = self.dropout if self.training else 0.0
        target, source = q.shape[2], k.shape[2]
        if not need_weights:
            if mask is not None:
                single = mask.shape[0] == 1
                mask = mask.unsqueeze(0) if single else mask.view(examples, self.num_heads, mask.shape[1], source)
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
            return attended.permute(2, 0, 1, 3).reshape(examples * target, self.embed_dim), None
        q, k, v = (x.flatten(0, 1) for x in heads)
        q = q * math.sqrt(1.0 / float(self.head_dim))
        scores = torch.bmm(q, k.mT) if mask is None else torch.baddbmm(mask, q, k.mT)
        weights = F.softmax(scores, dim=-1)
        if dropout > 0.0:
            weights = F.dropout(weights, p=dropout)
        attended = torch.bmm(weights, v).transpose(0, 1).reshape(target * examples, self.embed_dim)
        return attended, weights.view(examples, self.num_heads, target, source)

    def example_dims(self, call: LayerCall) -> Sequence[int]:
        added = any(name in ("bias_k", "bias_v") for name in call.parameters)
        return (call.batch_dim,) if added else range(len(call.shape) - 1)

    @classmethod
    def parameter_names(cls, module: torch.nn.Module) -> tuple[str, ...]:
        packed = ("in_proj_weight", "in_proj_bias", "bias_k", "bias_v")
        return (*packed, "q_proj_weight", "k_proj_weight", "v_proj_weight")

    def per_example(
        self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor
    ) -> PerExampleGrads | Tensor:
        if name in ("bias_k", "bias_v"):
            return grad.movedim(1, 0).unsqueeze(1)
        grad = examples_first(grad, call.batch_dim)
        if name == "in_proj_bias":
            return summed_positions(grad)
        left, right = grad, examples_first(inputs[0], call.batch_dim)
        return OuterProduct(left, right, torch.Size((left.shape[2], right.shape[2])))


def _masks(
    query: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_causal: bool, need_weights: bool
) -> tuple[Tensor | None, Tensor | None, bool]:
    """Both masks as floats to be added, by torch's own reading of them, and whether the causal hint still stands."""
    key_padding_mask = F._canonical_mask(
        mask=key_padding_mask,
        mask_name="key_padding_mask",
        other_type=F._none_or_dtype(attn_mask),
        other_name="attn_mask",
        target_type=query.dtype,
    )
    if is_causal and key_padding_mask is None and not need_weights:
        return key_padding_mask, None, True
    attn_mask = F._canonical_mask(
        mask=attn_mask,
        mask_name="attn_mask",
        other_type=None,
        other_name="",
        target_type=query.dtype,
        check_other=False,
    )
    return key_padding_mask, attn_mask, is_causal and key_padding_mask is None


def _transposed(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, E] to [T, B, E], the same tensor staying the same."""
    q = query.transpose(1, 0)
    k = q if key is query else key.transpose(1, 0)
    return q, k, (k if value is key else value.transpose(1, 0))


def _product(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """F.linear(input, weight, bias), and the input as it was multiplied and is kept for its weight's gradient."""
    if input.is_contiguous() or not weight.requires_grad:
        return F.linear(input, weight, bias), input
    # F.linear copies the input where it isn't contiguous and adds the bias apart; its copy would be out of reach.
    input = input.contiguous()
    output = F.linear(input, weight)
    return (output if bias is None else output.add_(bias.to(output.dtype))), input


def _divided(packed: Tensor, parts: int) -> tuple[Tensor, ...]:
    """[T, B, parts * E] as views [T, B, E], whose gradients are put together example by example, without a copy."""
    sides = packed.transpose(0, 1).chunk(parts, 2)
    return tuple([side.transpose(0, 1) for side in sides])


def _widened(mask: Tensor | None) -> Tensor | None:
    """The mask with a column of zeros for an added position."""
    return None if mask is None else F.pad(mask, (0, 1))
