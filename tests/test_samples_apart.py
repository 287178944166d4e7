"""What a sample gives must not depend on its place in the batch, nor on the samples beside it.

Every model is verified on four microbatches of one or two samples against the plain model on all of
them: either it is exact, or it is refused by name.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mllm_compile.compiler.errors import RequestError
from mllm_compile.compiler.request import ModuleSpec, Request
from mllm_compile.verify import verify
from mllm_compile.workload import Workload

TOKENS, WIDTH, HEADS = 6, 8, 2


class Model(nn.Module):
    """Hidden states [B, S, H] of every sample, and any loss of them."""

    def __init__(self, loss):
        super().__init__()
        self.embed, self.body, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)
        self.attention_of_samples = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.table = nn.Embedding(16, WIDTH)
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.loss = loss

    def forward(self, x, y, ids, lengths):
        hidden = torch.tanh(self.embed(x))
        return self.loss(self, hidden, y, ids, lengths)

    def out(self, hidden):
        return self.head(torch.tanh(self.body(hidden)))


def samples():
    g = torch.Generator().manual_seed(0)
    made = []
    for count in (6, 2, 5, 1, 3, 6, 4, 2):
        made.append(
            {
                "x": torch.randn(TOKENS, WIDTH, generator=g),
                "y": torch.randn(TOKENS, WIDTH, generator=g),
                "ids": torch.randint(0, 16, (TOKENS,), generator=g),
                "lengths": torch.tensor(count),
            }
        )
    return made


def collate(items):
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def verified(loss, size=2, microbatches=4):
    torch.manual_seed(0)
    request = Request(
        (ModuleSpec(("",), (0,)),), dtype="float64", microbatches=microbatches, microbatch_size=size
    )
    return verify(request, Workload(Model(loss), samples(), collate), in_process=True)


APART, MEET = {}, {}
NEEDS_TWO = {  # samples, to run
    "halves_compared", "difference_of_samples", "product_of_losses", "first_loss_twice",
}  # fmt: skip


def apart(function):
    APART[function.__name__] = function
    return function


def meet(function):
    MEET[function.__name__] = function
    return function


# Samples picked, moved or numbered by their place in the batch.


@apart
def attention_in_five_dims(model, h, y, ids, lengths):
    q = h.unflatten(-1, (1, HEADS, -1)).movedim(1, 3)
    mixed = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return F.mse_loss(model.out(mixed.movedim(3, 1).flatten(2)), y)


@meet
def first_by_slice(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h[:1]), y[:1])


@meet
def first_by_select(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h)[0], y[0])


@meet
def last_by_select(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h), y) + model.out(h)[-1].pow(2).mean()


@meet
def next_sample(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h)[1:], y[:-1])


@meet
def difference_of_neighbours(model, h, y, ids, lengths):
    p = model.out(h)
    return (p[1:] - p[:-1]).pow(2).mean()


@meet
def every_second(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h[::2]), y[::2])


@meet
def pairs_by_step(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h[::2]), y[1::2])


@meet
def flipped(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h.flip(0)), y)


@meet
def flipped_target(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h), y.flip(0))


@meet
def rolled(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h).roll(1, 0), y)


@meet
def rolled_by_cat(model, h, y, ids, lengths):
    return F.mse_loss(model.out(torch.cat([h[1:], h[:1]])), y)


@meet
def reversed_by_stack(model, h, y, ids, lengths):
    return F.mse_loss(model.out(torch.stack([h[i] for i in reversed(range(len(h)))])), y)


@meet
def first_half(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h.chunk(2, 0)[0]), y.chunk(2, 0)[0])


@meet
def halves_compared(model, h, y, ids, lengths):
    one, other = model.out(h).chunk(2, 0)
    return F.mse_loss(one, other)


@meet
def narrowed(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h.narrow(0, 0, 1)), y.narrow(0, 0, 1))


@meet
def first_by_index_select(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h.index_select(0, torch.tensor([0]))), y[[0]])


@meet
def first_by_list(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h[[0]]), y[[0]])


@meet
def reversed_by_index(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h[torch.arange(len(h)).flip(0)]), y)


@meet
def reversed_by_gather(model, h, y, ids, lengths):
    order = (len(h) - 1 - torch.arange(len(h)))[:, None, None].expand(h.shape)
    return F.mse_loss(model.out(h.gather(0, order)), y)


@meet
def reversed_ids(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h + model.table(ids.flip(0))), y)


@meet
def scaled_by_place(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h) * torch.arange(len(h))[:, None, None], y)


@meet
def scaled_by_place_from_one(model, h, y, ids, lengths):
    places = torch.linspace(1, 2, len(h), dtype=h.dtype)
    return F.mse_loss(model.out(h) * places.view(-1, 1, 1), y)


@meet
def scaled_by_counted_ones(model, h, y, ids, lengths):
    places = torch.ones(len(h), dtype=h.dtype).cumsum(0)
    return F.mse_loss(model.out(h) * places[:, None, None], y)


@meet
def place_embedded(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h + model.table(torch.arange(len(h)))[:, None]), y)


@meet
def place_in_ids(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h + model.table((ids + torch.arange(len(h))[:, None]) % 16)), y)


@meet
def rows_of_a_parameter(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h) * model.table.weight[: len(h), None], y)


@meet
def triangle_of_samples(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h), y) + (h.transpose(0, 2).tril() ** 2).sum()


@meet
def pairs_of_samples(model, h, y, ids, lengths):
    p = model.out(h).mean(1)
    return (p[:, None] - p[None]).pow(2).mean()


@meet
def first_overwritten(model, h, y, ids, lengths):
    p = model.out(h)
    p[0] = 0.0
    return F.mse_loss(p, y)


@meet
def first_rows_overwritten(model, h, y, ids, lengths):
    p = model.out(h)
    p[:1] = y[:1]
    return F.mse_loss(p, y)


@meet
def difference_of_samples(model, h, y, ids, lengths):
    p = model.out(h)
    return (p[0] - p[1]).pow(2).mean() + F.mse_loss(p, y)


@meet
def product_of_losses(model, h, y, ids, lengths):
    one, other = (F.mse_loss(model.out(h)[i], y[i]) for i in range(2))
    return one * other


@apart
def unbound(model, h, y, ids, lengths):
    return F.mse_loss(torch.stack([model.out(row) for row in h.unbind(0)]), y)


@apart
def one_after_another(model, h, y, ids, lengths):
    return F.mse_loss(torch.stack([model.out(h[i]) for i in range(len(h))]), y)


@apart
def attention_over_written_rows(model, h, y, ids, lengths):
    written = h.clone()
    written[ids > 7] = model.table(ids[ids > 7])
    heads = written.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    mixed = (heads @ heads.transpose(-1, -2)).softmax(-1) @ heads
    return F.mse_loss(model.out(mixed.transpose(1, 2).flatten(2)), y)


@apart
def attention_of_shifted_tokens(model, h, y, ids, lengths):
    """As decoders make their inputs from labels."""
    shifted = torch.zeros_like(ids)
    shifted[:, 1:] = ids[:, :-1]
    shifted[:, 0] = 3
    tokens = model.body(model.table(shifted))
    q, k = (x.view(len(h), -1, HEADS, WIDTH // HEADS).transpose(1, 2) for x in (tokens, h))
    mixed = F.scaled_dot_product_attention(q, k, k)
    return F.mse_loss(model.out(mixed.transpose(1, 2).reshape(h.shape)), y)


@apart
def pixels_shuffled(model, h, y, ids, lengths):
    pixels = F.pixel_unshuffle(h.unsqueeze(1), 2)
    return F.mse_loss(model.out(F.pixel_shuffle(torch.tanh(pixels), 2).squeeze(1)), y)


@meet
def instances_scaled_by_place(model, h, y, ids, lengths):
    """As instance_norm, but every sample has a scale of its own."""
    rows = h.flatten(0, 1)[None]
    scale = 1 + torch.arange(rows.shape[1]).to(h.dtype)
    return F.mse_loss(model.out(F.batch_norm(rows, None, None, scale, training=True)).view_as(y), y)


@apart
def slices_of_one(model, h, y, ids, lengths):
    return F.mse_loss(torch.cat([model.out(h[i : i + 1]) for i in range(len(h))]), y)


@apart
def chunks_of_two(model, h, y, ids, lengths):
    return F.mse_loss(torch.cat([model.out(part) for part in h.split(2)]), y)


@apart
def written_one_after_another(model, h, y, ids, lengths):
    out = torch.zeros_like(h)
    for i in range(len(h)):
        out[i] = model.out(h[i])
    return F.mse_loss(out, y)


@apart
def summed_one_after_another(model, h, y, ids, lengths):
    loss = 0.0
    for i in range(len(h)):
        loss = loss + F.mse_loss(model.out(h[i]), y[i])
    return loss


@apart
def tokens_sliced(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h[:, -3:]), y[:, :3]) + model.out(h)[..., :-1, :].pow(2).mean()


@apart
def tokens_flipped(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h.flip(1)).roll(1, 1), y)


@apart
def first_token(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h)[:, 0], y.select(1, 0))


@apart
def token_places(model, h, y, ids, lengths):
    places = torch.arange(h.shape[1])
    return F.mse_loss(model.out(h * places[None, :, None] + model.table(places)), y)


@apart
def token_places_repeated(model, h, y, ids, lengths):
    places = model.table(torch.arange(h.shape[1]).repeat(len(h)))
    return F.mse_loss(model.out(h.flatten(0, 1) + places), y.flatten(0, 1))


@apart
def last_token_by_index(model, h, y, ids, lengths):
    rows = torch.arange(len(h))
    return F.mse_loss(model.out(h)[rows, lengths - 1], y[rows, lengths - 1])


@apart
def all_rows(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h[:])[0:][: len(h)], y)


# Attention.


def heads(x):
    return x.unflatten(-1, (HEADS, -1))


@meet
def attention_over_samples(model, h, y, ids, lengths):
    q = heads(model.body(h)).permute(1, 2, 0, 3)  # [S, heads, B, D]
    out = F.scaled_dot_product_attention(q, q, q).permute(2, 0, 1, 3)
    return F.mse_loss(model.head(out.flatten(2)), y)


@meet
def attention_over_samples_with_constant_mask(model, h, y, ids, lengths):
    q = heads(model.body(h)).permute(1, 2, 0, 3)
    mask = torch.ones(len(h), len(h), dtype=torch.bool).tril()
    out = F.scaled_dot_product_attention(q, q, q, mask).permute(2, 0, 1, 3)
    return F.mse_loss(model.head(out.flatten(2)), y)


@meet
def attention_of_three_dims_over_samples(model, h, y, ids, lengths):
    q = model.body(h).transpose(0, 1)
    return F.mse_loss(F.scaled_dot_product_attention(q, q, q).transpose(0, 1), y)


@meet
def module_given_samples_first(model, h, y, ids, lengths):
    return F.mse_loss(model.attention(h, h, h, need_weights=False)[0], y)


@meet
def module_with_weights_given_samples_first(model, h, y, ids, lengths):
    return F.mse_loss(model.attention(h, h, h)[0], y)


@meet
def keys_of_all_samples(model, h, y, ids, lengths):
    k = heads(model.body(h)).transpose(1, 2).permute(1, 0, 2, 3).flatten(1, 2)[None]
    q = heads(h).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k.expand(len(q), -1, -1, -1), k)
    return F.mse_loss(model.head(out.transpose(1, 2).flatten(2)), y)


@apart
def attention_over_tokens(model, h, y, ids, lengths):
    q = heads(model.body(h)).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)
    return F.mse_loss(model.head(out.flatten(2)), y)


@apart
def module_given_tokens_first(model, h, y, ids, lengths):
    t = h.transpose(0, 1)
    out = model.attention(t, t, t, need_weights=False)[0]
    return F.mse_loss(out.transpose(0, 1), y)


@apart
def module_of_samples(model, h, y, ids, lengths):
    return F.mse_loss(model.attention_of_samples(h, h, h, need_weights=False)[0], y)


@apart
def packed_attention(model, h, y, ids, lengths):
    """All tokens in one row; samples are kept apart by a mask from the batch."""
    q = heads(model.body(h).flatten(0, 1)).transpose(0, 1)[None]
    keys = (torch.arange(h.shape[1]) < lengths[:, None]).cumsum(1)
    sample = torch.cat([torch.full_like(row, i) + 0 * row for i, row in enumerate(keys.unbind())])
    out = F.scaled_dot_product_attention(q, q, q, sample[:, None] == sample)
    return F.mse_loss(model.head(out[0].transpose(0, 1).flatten(1)), y.flatten(0, 1))


# Means of single samples.


@apart
def mean_of_ragged_means(model, h, y, ids, lengths):
    o, n = model.out(h), lengths.tolist()
    return torch.stack([F.mse_loss(o[i, : n[i]], y[i, : n[i]]) for i in range(len(o))]).mean()


@apart
def sum_of_ragged_means(model, h, y, ids, lengths):
    o, n = model.out(h), lengths.tolist()
    return sum(F.mse_loss(o[i, : n[i]], y[i, : n[i]]) for i in range(len(o)))


@apart
def mean_of_ragged_cross_entropies(model, h, y, ids, lengths):
    o, n = model.out(h), lengths.tolist()
    losses = [F.cross_entropy(o[i, : n[i]], ids[i, : n[i]] % WIDTH) for i in range(len(o))]
    return torch.stack(losses).mean()


@apart
def mean_over_parts(model, h, y, ids, lengths):
    keep = torch.arange(h.shape[1]) < lengths[:, None]
    parts = model.out(h[keep]).split(lengths.tolist())
    targets = y[keep].split(lengths.tolist())
    return torch.stack([F.mse_loss(p, t) for p, t in zip(parts, targets, strict=True)]).mean()


@apart
def mean_of_squares_of_parts(model, h, y, ids, lengths):
    keep = torch.arange(h.shape[1]) < lengths[:, None]
    parts = model.out(h[keep]).split(lengths.tolist())
    return torch.stack([part.pow(2).mean() for part in parts]).mean()


@apart
def heads_of_codebooks(model, h, y, ids, lengths):
    """A loop over something that is not samples: a mean over all of them in every turn."""
    o = model.out(h).unflatten(-1, (2, -1)).permute(2, 0, 1, 3)  # [K, B, S, C]
    loss = 0.0
    for k in range(2):
        loss = loss + F.cross_entropy(o[k].flatten(0, 1), (ids + k).flatten() % 4)
    return loss


@apart
def stacked_codebooks(model, h, y, ids, lengths):
    o = model.out(h).unflatten(-1, (2, -1))
    return torch.stack(
        [F.cross_entropy(o[:, :, k].flatten(0, 1), ids.flatten() % 4) for k in range(2)]
    ).mean()


# Samples that are treated unlike each other.


def losses(model, h, y):
    return (model.out(h) - y).pow(2).mean((1, 2))


@meet
def first_loss_twice(model, h, y, ids, lengths):
    t = losses(model, h, y)
    return 2 * t[0] + t[1]


@meet
def weight_of_each(model, h, y, ids, lengths):
    t = losses(model, h, y)
    return sum(w * one for w, one in zip([1.0, 2.0, 3.0, 4.0], t, strict=False))


@meet
def first_loss_added_again(model, h, y, ids, lengths):
    first, *rest = losses(model, h, y)
    return first + sum(rest) + first


@meet
def sum_of_others_twice(model, h, y, ids, lengths):
    first, *rest = losses(model, h, y).unbind()
    return 2 * sum(rest) + first


@meet
def weight_in_constant(model, h, y, ids, lengths):
    return sum(torch.tensor(i + 1.0) * t for i, t in enumerate(losses(model, h, y)))


@meet
def weight_besides_lengths(model, h, y, ids, lengths):
    o, n = model.out(h), lengths.tolist()
    return sum((i + 1) * F.mse_loss(o[i, : n[i]], y[i, : n[i]]) for i in range(len(o)))


@meet
def weight_of_each_besides_lengths(model, h, y, ids, lengths):
    o, n, w = model.out(h), lengths.tolist(), torch.tensor([*range(1, 9)])
    return sum(w[i] * F.mse_loss(o[i, : n[i]], y[i, : n[i]]) for i in range(len(o)))


@meet
def row_of_parameter_for_each(model, h, y, ids, lengths):
    o, n, rows = model.out(h), lengths.tolist(), model.table.weight
    return sum((o[i, : n[i]] * rows[i]).pow(2).mean() for i in range(len(o)))


@meet
def ones_added_to_each(model, h, y, ids, lengths):
    return sum(one * torch.ones(i + 1).sum() for i, one in enumerate(losses(model, h, y)))


@meet
def layer_of_each(model, h, y, ids, lengths):
    layers = [model.body, model.head] * 4
    return F.mse_loss(torch.stack([f(row) for f, row in zip(layers, h, strict=False)]), y)


@meet
def layer_of_each_written(model, h, y, ids, lengths):
    out = torch.zeros_like(h)
    for i, layer in zip(range(len(h)), [model.body, model.head] * 4, strict=False):
        out[i] = layer(h[i])
    return F.mse_loss(out, y)


@meet
def activation_of_first(model, h, y, ids, lengths):
    first, *rest = model.out(h)
    return sum((row.mean() for row in rest), first.relu().mean())


@meet
def tokens_of_each(model, h, y, ids, lengths):
    o = model.out(h)
    return sum(o[i, : i + 1].pow(2).mean() for i in range(len(o)))


def first_and_rest(model, h, y, ids, lengths):
    parts = model.out(h).split([1, len(h) - 1])
    return sum(part.pow(2).mean() for part in parts)


def first_and_rest_of_tokens(model, h, y, ids, lengths):
    parts = model.out(h).flatten(0, 1).split([TOKENS, (len(h) - 1) * TOKENS])
    return torch.stack([part.pow(2).mean() for part in parts]).mean()


@meet
def differences_of_ids(model, h, y, ids, lengths):
    steps = (ids[1:] - ids[:-1]) % 16
    return F.mse_loss(model.out(h[1:] + model.table(steps)), y[1:])


@meet
def ids_of_first(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h + model.table(ids[0])), y)


@meet
def scaled_by_differences_of_ids(model, h, y, ids, lengths):
    steps = (ids[:1] - ids[1:2]).sum()
    return F.mse_loss(model.out(h) * steps, y)


@meet
def tokens_picked_by_other_sample(model, h, y, ids, lengths):
    order = (ids[:1] - ids[-1:]) % TOKENS + 0 * ids
    return F.mse_loss(model.out(h), y) + h.gather(1, order[..., None]).mean()


@apart
def sum_from_zero(model, h, y, ids, lengths):
    loss = torch.zeros((), dtype=h.dtype)
    for one in losses(model, h, y):
        loss = loss + 0.5 * one
    return loss


@apart
def two_terms_of_each(model, h, y, ids, lengths):
    loss = 0.0
    for i, one in enumerate(losses(model, h, y)):
        loss = loss + 2 * one + model.body(h[i]).pow(2).mean()
    return 3 * loss


@apart
def rows_split_by_one(model, h, y, ids, lengths):
    parts = model.out(h).split([1] * len(h))
    return sum(part.pow(2).mean() for part in parts)


@apart
def tokens_split_by_sample(model, h, y, ids, lengths):
    parts = model.out(h).flatten(0, 1).split([TOKENS] * len(h))
    return torch.stack([part.pow(2).mean() for part in parts]).mean()


@apart
def ragged_rows_padded(model, h, y, ids, lengths):
    o, n = torch.zeros_like(h), lengths.tolist()
    for i in range(len(h)):
        o[i, : n[i]] = model.out(h[i, : n[i]])
    return F.mse_loss(o, y)


@apart
def first_tokens_written(model, h, y, ids, lengths):
    o = torch.zeros_like(h)
    for i in range(len(h)):
        o[i, :3] = model.out(h[i, :3])
    return F.mse_loss(o, y)


@apart
def differences_of_tokens(model, h, y, ids, lengths):
    steps = (ids[:, 1:] - ids[:, :-1]) % 16
    return F.mse_loss(model.out(h[:, 1:] + model.table(steps)), y[:, 1:])


@apart
def ids_one_after_another(model, h, y, ids, lengths):
    rows = [model.out(row + model.table(i % 16)) for row, i in zip(h, ids, strict=True)]
    return F.mse_loss(torch.stack(rows), y)


@apart
def rotary_sections_of_tokens(model, h, y, ids, lengths):
    """Three sections of positions that are the same for all samples, as M-RoPE takes them."""
    positions = torch.arange(TOKENS).expand(3, len(h), TOKENS)
    angles = torch.cos(positions[..., None] * torch.arange(1.0, 5.0, dtype=h.dtype))
    parts = [part[k % 3] for k, part in enumerate(angles.split([1, 1, 2], -1))]
    factor = torch.cat(parts, -1)
    return F.mse_loss(model.out(h) * factor.mean(-1, keepdim=True), y)


@meet
def sections_of_samples(model, h, y, ids, lengths):
    positions = torch.arange(float(len(h)), dtype=h.dtype)[:, None].expand(len(h), 4)
    first, second = positions.split([1, 3], -1)
    factor = torch.cat([second, first], -1).mean(-1)
    return F.mse_loss(model.out(h) * factor[:, None, None], y)


# What a microbatch leaves behind in a buffer.


@meet
def steps_counted(model, h, y, ids, lengths):
    model.steps += 1
    return F.mse_loss(model.out(h), y) * model.steps.sqrt()


@meet
def decayed_by_steps_before(model, h, y, ids, lengths):
    loss = F.mse_loss(model.out(h), y) * torch.exp(-model.steps)
    model.steps += 1
    return loss


@meet
def spectral_norm(model, h, y, ids, lengths):
    return F.mse_loss(model.normed(h), y)


@meet
def running_centre(model, h, y, ids, lengths):
    loss = F.mse_loss(model.out(h) - model.centre, y)
    model.centre.mul_(0.9).add_(0.1 * h.detach().mean((0, 1)))
    return loss


@apart
def steps_counted_for_nothing(model, h, y, ids, lengths):
    model.steps += 1
    return F.mse_loss(model.out(h), y)


@apart
def buffer_that_stays(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h) - model.centre, y) * torch.exp(-model.steps)


def tried(loss, size=2, microbatches=4):
    try:
        result = verified(loss, size, microbatches)
    except RequestError as error:
        return str(error)
    return "exact" if result.passed else f"WRONG {result.loss_error:.1e} {result.max_error:.1e}"


def instances_normed(model, h, y, ids, lengths):
    scale = model.table.weight[:TOKENS, 0]
    return F.mse_loss(model.out(F.instance_norm(h, weight=scale, bias=scale)), y)


def test_statistics_of_a_channel_of_one_sample_are_its_own():
    assert tried(instances_normed) == "exact"


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("size", [1, 2])
def test_samples_that_stay_apart_split_exactly(name, size):
    assert tried(APART[name], size) == "exact"


def dropped(model, h, y, ids, lengths):
    return F.mse_loss(model.out(F.dropout(h, 0.5)), y)


def noisy(model, h, y, ids, lengths):
    return F.mse_loss(model.out(h + torch.randn_like(h)), y)


def dropped_out_of_a_sample(model, h, y, ids, lengths):
    return F.mse_loss(model.out(F.dropout(h[:1], 0.5) + h), y)


@pytest.mark.parametrize("loss", [dropped, noisy])
def test_random_numbers_belong_to_the_sample_that_they_are_drawn_for(loss):
    """Nothing else is held against them than that verification finds nothing to compare."""
    assert "a model without random numbers" in tried(loss)
    assert "expected 1 each" in tried(dropped_out_of_a_sample)


@pytest.mark.parametrize("name", MEET)
def test_samples_that_meet_are_refused(name):
    answer = tried(MEET[name])
    assert "microbatches and data lanes: expected 1 each" in answer, answer
    assert "test_samples_apart.py:" in answer


@pytest.mark.parametrize("loss", [first_and_rest, first_and_rest_of_tokens])
def test_a_part_with_several_samples_is_none_of_them(loss):
    answer = tried(loss, 4, microbatches=2)
    assert "microbatches and data lanes: expected 1 each" in answer, answer


@pytest.mark.parametrize("name", sorted({*MEET} - NEEDS_TWO))
def test_one_sample_does_not_hide_that_samples_meet(name):
    """Microbatches of one sample: there ``x[:1]`` is all of it, and ``flip`` changes nothing."""
    answer = tried(MEET[name], 1)
    assert "microbatch" in answer, answer
    assert "test_samples_apart.py:" in answer


@pytest.mark.parametrize("name", ["flipped", "first_by_slice", "attention_over_samples"])
def test_one_microbatch_is_always_legal(name):
    assert tried(MEET[name], 4, microbatches=1) == "exact"
