"""Bring a parameter to a rank that newly holds it, as training has made it.

A step may bring a kind of sample that no earlier step had; its program may then read a parameter on
another rank than before. The value and the optimizer's state travel together, serialised, because
the receiver cannot know what the optimizer keeps.
"""

import io
from typing import Any

import torch
from torch import nn

from mllm_compile.runtime.transport import Transport


def send_parameter(
    transport: Transport,
    parameter: nn.Parameter,
    optimizer: torch.optim.Optimizer | None,
    peer: int,
) -> None:
    """Send value and optimizer state to rank ``peer``, which calls :func:`receive_parameter`."""
    kept = optimizer.state.get(parameter, {}) if optimizer is not None else {}
    buffer = io.BytesIO()
    torch.save((parameter.detach(), dict(kept)), buffer)
    data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    for tensor in (torch.tensor([len(data)]), data):
        transport.send(tensor.to(transport.device), peer).wait()


def receive_parameter(transport: Transport, peer: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """The value and the optimizer's state that rank ``peer`` sends."""
    size = torch.zeros(1, dtype=torch.int64, device=transport.device)
    transport.receive(size, peer).wait()
    data = torch.empty(int(size), dtype=torch.uint8, device=transport.device)
    transport.receive(data, peer).wait()
    value, kept = torch.load(
        io.BytesIO(data.cpu().numpy().tobytes()), map_location=transport.device, weights_only=True
    )
    return value, kept
