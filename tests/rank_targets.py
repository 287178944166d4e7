"""What the tests call on ranks that are processes."""

import os
import signal
import sys
import time
from typing import Any

import pytest
import torch

from mllm_compile.compiler.errors import GuardError, RunError
from mllm_compile.compiler.request import Optimizer
from mllm_compile.runtime import checkpoint
from mllm_compile.runtime.distributed_transport import DistributedTransport
from mllm_compile.runtime.groups import NativeGroup
from mllm_compile.runtime.optimizer import make_optimizer
from mllm_compile.runtime.rank_main import RankContext
from mllm_compile.runtime.state import State
from mllm_compile.runtime.transport import PeerLostError
from tests import group_work, layouts_of_ranks, wide_stages
from tests.three_stages import batches, model, run_rank

CPU = torch.device("cpu")
CHANNELS = [(0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1)]


def echo(context: RankContext, payload: Any) -> Any:
    print(f"hello from {context.rank}")
    return {"rank": context.rank, "payload": payload, "tensor": torch.full((2,), context.rank)}


def order_of_a_set(context: RankContext, names: list[str]) -> list[str]:
    """As a model's forward may iterate."""
    return list(set(names))


def transfers(context: RankContext, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every tensor goes up from rank 0 to 1 and back, both directions at once."""
    transport = DistributedTransport(CPU, CHANNELS[:1])
    peer = 1 - context.rank
    got = [torch.empty_like(t).contiguous() for t in tensors]
    handles = [transport.receive(buffer, peer) for buffer in got]
    handles += [transport.send(t.contiguous(), peer) for t in tensors]
    for handle in handles:
        handle.wait()
    parts = transport.all_gather(torch.tensor([float(context.rank)]))
    transport.close()
    return [*got, *parts]


def pipeline(context: RankContext, rows: list[int | None]) -> Any:
    transport = DistributedTransport(CPU, CHANNELS)
    result, state = run_rank(transport, model(), batches(rows))
    norm = state.grad_norm(transport)
    transport.close()
    grads = {name: parameter.grad for name, parameter in state.parameters.items()}
    return dict(result.losses), grads, result.measures, norm


def fails(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank of a running pipeline misbehaves in the middle of a step."""
    context.label(f"stage {context.rank}, model.part{context.rank}")
    transport = DistributedTransport(CPU, CHANNELS)

    def publish(text: str) -> None:
        context.publish(text)
        if context.rank == payload["rank"] and text.startswith(payload["at"]):
            misbehave(payload["how"])

    for _ in range(1000):
        run_rank(transport, model(), batches([2, 3, 1]), publish=publish)


def misbehave(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        print("about to leave", flush=True)
        os._exit(3)
    if how == "vanish":
        os._exit(0)
    if how == "leave":
        sys.exit(0)
    if how == "raise":
        raise ValueError("a broken sample")
    if how == "guard":
        raise GuardError("microbatch 1: expected 3 images, got 4")
    if how == "hang":
        print("hanging", flush=True)
        time.sleep(1000)


def misbehaves(context: RankContext, how: str) -> None:
    context.label("a part")
    context.publish("its work")
    if context.rank == 1:
        misbehave(how)
    time.sleep(1000)


def sleeps(context: RankContext, payload: Any) -> None:
    context.publish("sleeping")
    time.sleep(1000)


def survives(context: RankContext, payload: Any) -> str:
    """What the survivor of a dead peer is told, without any launcher's help."""
    transport = DistributedTransport(CPU, CHANNELS)

    def publish(text: str) -> None:
        if context.rank == 1 and text.startswith("1F2"):
            time.sleep(0.5)
            os._exit(0)

    try:
        run_rank(transport, model(), batches([2, 3, 1]), publish=publish)
    except PeerLostError as error:
        return str(error)
    return "nothing"


def checkpointed(context: RankContext, payload: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Take a step of AdamW or load one into other numbers, save; returns the rank's tensors."""
    transport = DistributedTransport(CPU)
    full = model()
    counts = {f"count{rank}": torch.tensor(0) for rank in range(3)}
    state = State({n: full[n] for n in payload["split"][context.rank]}, counts)
    optimizer = make_optimizer(Optimizer("AdamW", lr=0.1), state.parameters)
    assert optimizer is not None
    for parameter in state.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if payload["source"] is None:
        state.set_buffer(f"count{context.rank}", torch.tensor(7 + context.rank))
    else:
        optimizer.step()
        path = checkpoint.checkpoints(payload["source"])[-1]
        checkpoint.load(path, state, optimizer, rank=context.rank)
    checkpoint.save(payload["target"], 1, state, optimizer, rank=context.rank)
    transport.close()
    found = {name: value.detach() for name, value in state.parameters.items()}
    if payload["source"] is not None:
        found |= state.buffers
    for name, parameter in state.parameters.items():
        found.update({f"{name} {k}": value for k, value in optimizer.state[parameter].items()})
    return found


def collectives(context: RankContext, payload: dict[str, Any]) -> Any:
    """All calls of the n-th group with seed n, and transfers that stay under way meanwhile."""
    transport = DistributedTransport(CPU, CHANNELS)
    transport.connect(payload["groups"])
    transport.connect(payload["groups"][:1])  # known ones stay
    peers = [peer for peer in range(transport.num_ranks) if peer != context.rank]
    buffers = [torch.zeros(1) for _ in peers]
    handles = [transport.receive(b, peer) for b, peer in zip(buffers, peers, strict=True)]
    results = {}
    for seed, ranks in enumerate(payload["groups"]):
        if context.rank in ranks:
            group = transport.group(ranks)
            if payload["native"]:
                links = group._links
                group = NativeGroup(ranks, context.rank, links, links.group)
            results[ranks] = group_work.run(group, seed)
    handles += [transport.send(torch.tensor([1.0 + context.rank]), peer) for peer in peers]
    for handle in handles:
        handle.wait()
    assert [float(buffer) for buffer in buffers] == [1.0 + peer for peer in peers]
    if context.rank == 1:
        with pytest.raises(RunError, match=r"rank 1, group \(0, 2\): expected one that all ranks"):
            transport.group((0, 2))
    transport.close()
    return results


def trained(context: RankContext, payload: dict[str, Any]) -> dict[str, torch.Tensor]:
    transport = DistributedTransport(CPU)
    found = layouts_of_ranks.train(transport, payload)
    transport.close()
    return found


def wide(context: RankContext, payload: dict[str, Any]) -> Any:
    """One step of two stages on shared ranks; losses, gradients and what a survivor is told."""
    context.label("stages 0 and 1")
    layout = wide_stages.Wide((0, 1), (0, 1))
    programs = wide_stages.programs_of(layout, context.rank)
    state = wide_stages.state_of(layout, context.rank)
    transport = DistributedTransport(CPU, CHANNELS[:1] + CHANNELS[3:4])
    wide_stages.connect(layout, transport, state)

    def publish(text: str) -> None:
        context.publish(text)
        if context.rank == 1 and text.startswith(payload["dies_at"] or "never"):
            time.sleep(0.5)
            misbehave("kill" if payload.get("kill") else "vanish")

    try:
        result = wide_stages.run_rank(layout, transport, state, programs, publish=publish)
    except PeerLostError as error:
        return str(error)
    state.finish(transport)
    transport.close()
    return dict(result.losses), {name: p.grad for name, p in state.parameters.items()}
