"""What a model's attention calls become: one operator per call, one mask per mask of the model.

Masks arrive as predicates and become nodes when the model makes them, however many layers read
them: the model gets a dense mask, by which attention knows the intervals to use instead. The rules
by which transformers drops trivial masks are reproduced, because they decide what the unmodified
model computes. Two things stay plain operators: attention dropout, and a bias that is learned (the
operator has no gradient for it).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mllm_compile.compiler.errors import CaptureError, explain
from mllm_compile.kernels.attention import mask as predicates
from mllm_compile.kernels.attention import op, reference
from mllm_compile.passes.capture.attention_form import Form
from mllm_compile.passes.capture.attention_masks import ALL_KNOWN, Facts, blind, make

TORCH_SDPA = torch.nn.functional.scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class MaskOrigin:
    """Where a mask tensor came from: the predicate, and when transformers would have dropped it.

    ``intervals`` say the same as the mask; where there are none, ``reason`` says why.
    Where ``droppable`` and no key is padded, transformers passes no mask at all, and the module's
    own ``is_causal`` decides; ``causal`` says whether the mask itself is a causal one. ``blind``
    if a query may see no key, where eager attention asks.
    """

    description: str
    intervals: Tensor | None
    reason: str
    padding: Tensor | None = None
    droppable: bool = False
    causal: bool = False
    blind: bool = False


@dataclass
class AttentionSites:
    """What one capture saw: a line per attention call, and the masks that were made."""

    paths: dict[int, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    facts: Facts = ALL_KNOWN
    _origins: Any = field(default_factory=WeakIdKeyDictionary)
    _blind_masks: Any = field(default_factory=WeakIdKeyDictionary)
    _segments: list[tuple[Tensor, Tensor, int, int, Tensor]] = field(default_factory=list)

    def make_mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        use_vmap: bool = False,
        device: torch.device | str = "cpu",
        eager: bool = False,
        **_: Any,
    ) -> Tensor | None:
        """The mask of one kind of layer, [batch, 1, queries, keys]; None where none is needed.

        Arguments as transformers passes them to the functions of ``AttentionMaskInterface``;
        ``eager`` if the user chose its eager attention, which needs a causal mask always.
        """
        if isinstance(q_offset, Tensor) or isinstance(kv_offset, Tensor):
            raise CaptureError(
                explain("attention mask", got="a static cache", remedy="pass use_cache=False")
            )
        local = local_size is not None and kv_length >= local_size
        allow_is_causal_skip = allow_is_causal_skip and not eager
        causal = allow_is_causal_skip and (q_length == 1 or kv_length == q_length)
        droppable = (causal or allow_is_bidirectional_skip) and not local
        if droppable and attention_mask is None:
            return None
        template, tensors = predicates.separate(mask_function or _causal)
        padding = _padded_to(attention_mask, kv_length + kv_offset)
        rule = predicates.Predicate(
            template, len(tensors), q_offset, kv_offset, padding is not None, not use_vmap
        )
        tensors += [] if padding is None else [padding]
        return self._made(
            rule, tensors, (batch_size, q_length, kv_length), torch.device(device), eager,
            padding=padding, droppable=droppable, causal=allow_is_causal_skip,
        )  # fmt: skip

    def _made(
        self,
        rule: predicates.Predicate,
        tensors: list[Tensor],
        shape: tuple[int, int, int],
        device: torch.device,
        eager: bool = False,
        **dropped: Any,
    ) -> Tensor:
        made = make(rule, tensors, shape, device, self.facts, eager)
        description = predicates.describe(rule)
        self._origins[made.dense] = MaskOrigin(
            description, made.intervals, made.reason, blind=made.blind, **dropped
        )
        return made.dense

    def segment_mask(self, ends_q: Tensor, ends_k: Tensor, queries: int, keys: int) -> Tensor:
        """[1, 1, queries, keys]: both tokens lie in the same packed segment. One per cu_seqlens."""
        for known_q, known_k, *lengths, made in self._segments:
            if known_q is ends_q and known_k is ends_k and lengths == [queries, keys]:
                return made
        rule = _same_segment(*_bounds(ends_q, ends_k, queries, keys))
        template, tensors = predicates.separate(rule)
        predicate = predicates.Predicate(template, len(tensors))
        made = self._made(predicate, tensors, (1, queries, keys), ends_q.device)
        self._segments.append((ends_q, ends_k, queries, keys, made))
        return made

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        eager: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """One attention, as transformers calls the functions of ``AttentionInterface``.

        Takes [B, H, Q, D] and returns [B, Q, H, E]. ``s_aux`` are attention sinks: one logit per
        head that takes its share of the softmax and attends to nothing. ``eager`` attention, if
        the user chose that, knows masks alone, and adds their numbers.
        """
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        causal = bool(causal) and query.shape[2] > 1 and not eager
        mask: Tensor | None
        if attention_mask is None and cu_seq_lens_q is not None:
            ends_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
            mask = self.segment_mask(cu_seq_lens_q, ends_k, query.shape[2], key.shape[2])
        else:
            mask = self._effective(attention_mask, causal)
            causal = causal and mask is None
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        form = Form.of(mask, causal, scale, softcap or 0.0, dropout, s_aux)
        if eager and s_aux is None and mask is not None and self._blind(mask):
            form = form.with_numbers(key.dtype)
        if position_bias is not None:
            form = form.with_position_bias(position_bias, torch.finfo(key.dtype).min)
        where = self.paths.get(id(module), type(module).__name__)
        return self.attention(where, query, key, value, form).transpose(1, 2).contiguous(), None

    def _effective(self, mask: Tensor | None, causal: bool) -> Tensor | None:
        """The mask that the unmodified model would use."""
        if mask is None:
            return None
        if mask.dim() == 2:  # what models hand to flash kernels: which keys are real
            return mask.bool()[:, None, None, :]
        origin = self._origins.get(mask)
        dropped = (
            origin is not None
            and origin.droppable
            and origin.causal != causal
            and origin.padding is not None
            and bool(origin.padding.all())
        )
        return None if dropped else mask

    def _blind(self, mask: Tensor) -> bool:
        """Whether a query may see no key by this mask."""
        if mask not in self._blind_masks:
            origin = self._origins.get(mask)
            known = blind(mask, self.facts) if origin is None else origin.blind
            self._blind_masks[mask] = known
        return bool(self._blind_masks[mask])

    def attention(
        self, where: str, query: Tensor, key: Tensor, value: Tensor, form: Form
    ) -> Tensor:
        """The operator, or plain operators where it has no gradient or no random numbers."""
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (x.expand(batch, -1, -1, -1) for x in (query, key, value))
        origin = None if form.mask is None else self._origins.get(form.mask)
        intervals = None if origin is None else origin.intervals
        mask = form.mask if intervals is None else None
        arguments = (intervals, mask, form.bias, form.causal, form.scale, form.softcap)
        if form.needs_plain:
            out, lse = reference.attention(query, key, value, *arguments, form.dropout)
        else:
            out, lse = op.attention(query, key, value, *arguments)
        if form.sinks is not None:
            share = torch.sigmoid(lse - form.sinks.to(lse.dtype)[:, None])
            out = out * share.unsqueeze(-1).to(out.dtype)
        (_, heads, queries, size), (_, key_heads, keys, _) = query.shape, key.shape
        self.lines.append(
            f"{where}: {self._describe(form)}; heads {heads}/{key_heads}, "
            f"{queries}x{keys}, size {size}/{value.shape[-1]}"
        )
        return out

    def _describe(self, form: Form) -> str:
        parts = ["causal"] if form.causal else []
        if form.mask is not None:
            origin = self._origins.get(form.mask)
            parts.append("mask tensor" if origin is None else f"mask {origin.description}")
            parts += [f"dense: {origin.reason}"] if origin is not None and origin.reason else []
        parts += ["bias tensor"] if form.bias is not None else []
        parts += [f"softcap {form.softcap:g}"] if form.softcap else []
        parts += ["sinks"] if form.sinks is not None else []
        parts += [f"plain operators: {form.needs_plain}"] if form.needs_plain else []
        return ", ".join(parts) or "full"

    def from_sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """``scaled_dot_product_attention`` on the operator; other ranks than 3 and 4 stay torch's.

        [N, S, D] inputs are one head; a [N, Q, K] mask goes with them.
        """
        if query.dim() == 3 and key.dim() == 3 and value.dim() == 3:
            if attn_mask is not None and attn_mask.dim() == 3:
                attn_mask = attn_mask.unsqueeze(1)
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            out = self.from_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale)
            return out.squeeze(1)
        if not query.dim() == key.dim() == value.dim() == 4:
            return TORCH_SDPA(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip
        while attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask.unsqueeze(0)
        by_definition = value.shape[-1] != query.shape[-1]  # torch fuses neither of the two
        by_definition |= key.shape[1] != query.shape[1] and not enable_gqa
        if query.shape[1] < key.shape[1]:
            query = query.expand(-1, key.shape[1], -1, -1)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        form = Form.of(attn_mask, is_causal, scale, dropout=dropout_p)
        if by_definition and form.bias is not None and self._blind(form.bias):
            form = replace(form, blind=True)
        return self.attention("scaled_dot_product_attention", query, key, value, form)


def _padded_to(padding: Tensor | None, length: int) -> Tensor | None:
    """[B, at least length]: keys behind the end of a padding mask are hidden."""
    missing = 0 if padding is None else length - padding.shape[-1]
    if padding is None or missing <= 0:
        return padding
    return torch.nn.functional.pad(padding, (0, missing))


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def _same_segment(starts: Tensor, ends: Tensor) -> Callable[..., Tensor]:
    def same_segment(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (starts[query] <= key) & (key < ends[query])

    return same_segment


def _bounds(ends_q: Tensor, ends_k: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """[queries]: where the packed segment of each query starts and ends among the keys.

    Both arguments are cumulative, from 0; what lies behind the last segment is one more.
    """
    positions = torch.arange(queries, device=ends_q.device, dtype=ends_q.dtype)
    segment = torch.searchsorted(ends_q[1:].contiguous(), positions, right=True)
    ends = torch.nn.functional.pad(ends_k[1:], (0, 1), value=keys)
    return ends_k[segment], ends[segment]
