"""Bring a parameter to the ranks that newly hold it, as training has made it.

A step may bring a kind of sample that no earlier step had; its program may then read a parameter on
another rank than before. Value and optimizer state travel together, serialised, because the
receiver cannot know what the optimizer keeps: state of the parameter's shape as the parts of it
that the receiver needs, anything else whole.
"""

import io
from typing import Any

import torch
from torch import nn

from mllm_compile.compiler.reshard import Move, reshard
from mllm_compile.runtime.pieces import pack, unpack
from mllm_compile.runtime.placement import Placement
from mllm_compile.runtime.transport import Transport


def move_parameter(
    transport: Transport,
    name: str,
    before: Placement,
    after: Placement,
    parameter: nn.Parameter | None,
    optimizer: torch.optim.Optimizer | None,
) -> dict[str, Any]:
    """Fill the parameter on every rank of ``after`` that is none of ``before``.

    All ranks call it, in one order of names.

    Args:
        transport: this rank's end of the network.
        name: of the parameter, for messages.
        before: where it stood.
        after: where it stands now.
        parameter: this rank's part: the trained one, or the fresh one to be filled, or None.
        optimizer: that holds the trained part's state.

    Returns:
        The optimizer's state of a part that was filled; empty on other ranks.
    """
    targets = {rank: part for rank, part in after.held.items() if rank not in before.held}
    kept: dict[str, Any] = {}
    for move in reshard(name, before.held, targets) if targets else ():
        if move.source == transport.rank:
            assert parameter is not None
            _send(transport, move, parameter, optimizer)
        elif move.target == transport.rank:
            assert parameter is not None
            _receive(transport, move, parameter, kept)
    return kept


def _send(
    transport: Transport,
    move: Move,
    parameter: nn.Parameter,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
    alike = {key for key, value in state.items() if is_part(value, parameter)}
    entries = {
        key: pack(value, move.source_region) if key in alike else value
        for key, value in state.items()
    }
    buffer = io.BytesIO()
    torch.save((pack(parameter.detach(), move.source_region).clone(), entries, alike), buffer)
    data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    for tensor in (torch.tensor([len(data)]), data):
        transport.send(tensor.to(transport.device), move.target).wait()


def _receive(
    transport: Transport, move: Move, parameter: nn.Parameter, kept: dict[str, Any]
) -> None:
    size = torch.zeros(1, dtype=torch.int64, device=transport.device)
    transport.receive(size, move.source).wait()
    data = torch.empty(int(size), dtype=torch.uint8, device=transport.device)
    transport.receive(data, move.source).wait()
    value, entries, alike = torch.load(
        io.BytesIO(data.cpu().numpy().tobytes()), map_location=transport.device, weights_only=True
    )
    unpack(value, parameter.detach(), move.target_region)
    for key, entry in entries.items():
        if key in alike:
            made = kept.setdefault(key, entry.new_empty(parameter.shape))
            unpack(entry, made, move.target_region)
        else:
            kept[key] = entry


def is_part(value: object, parameter: torch.Tensor) -> bool:
    """Whether an entry of the optimizer's state has one number for each of the parameter."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape
