"""The form of one attention call: everything about it but q, k and v."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """Terms as in ``kernels/attention/reference.py``; ``sinks`` are one more logit per head.

    ``blind``: a query may see nothing, and then sees all keys alike, as in ``with_numbers``.
    """

    mask: Tensor | None
    bias: Tensor | None
    causal: bool
    scale: float
    softcap: float = 0.0
    dropout: float = 0.0
    sinks: Tensor | None = None
    blind: bool = False

    @staticmethod
    def of(
        mask: Tensor | None,
        causal: bool,
        scale: float,
        softcap: float = 0.0,
        dropout: float = 0.0,
        sinks: Tensor | None = None,
    ) -> "Form":
        """A floating mask is a bias."""
        if mask is not None and mask.is_floating_point():
            return Form(None, mask, causal, scale, softcap, dropout, sinks)
        return Form(mask, None, causal, scale, softcap, dropout, sinks)

    def with_position_bias(self, position_bias: Tensor, lowest: float) -> "Form":
        """One bias for all: what is hidden gets ``lowest``, as transformers does, and not -inf."""
        if self.bias is not None:
            return replace(self, bias=position_bias + self.bias)
        mask = self.mask
        if self.causal:
            pairs = position_bias.shape[-2:]
            mask = torch.ones(pairs, dtype=torch.bool, device=position_bias.device).tril()
        bias = position_bias if mask is None else torch.where(mask, position_bias, lowest)
        return replace(self, mask=None, causal=False, bias=bias)

    def with_numbers(self, dtype: torch.dtype) -> "Form":
        """The mask as eager attention adds it: the lowest number, and not -inf, where it hides.

        It swallows the scores of a query that sees nothing, whose weights then are all equal.
        """
        if self.mask is None:
            return replace(self, blind=True)
        seen = torch.zeros((), dtype=dtype, device=self.mask.device)
        bias = torch.where(self.mask, seen, torch.finfo(dtype).min)
        return replace(self, mask=None, bias=bias, blind=True)

    @property
    def needs_plain(self) -> str:
        """Why the operator cannot compute this; "" where it can."""
        if self.dropout:
            return "dropout"
        if self.blind:
            return "numbers as a mask, and queries that see no key"
        return "learned bias" if self.bias is not None and self.bias.requires_grad else ""
