"""Checkpoints: complete or not there, loadable under any plan."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mllm_compile.compiler.errors import RequestError
from mllm_compile.compiler.holding import Holding
from mllm_compile.compiler.layout import S
from mllm_compile.compiler.mesh import MeshAxis
from mllm_compile.compiler.request import Optimizer
from mllm_compile.runtime import checkpoint
from mllm_compile.runtime.launch import launch
from mllm_compile.runtime.local_transport import run_threads
from mllm_compile.runtime.optimizer import make_optimizer
from mllm_compile.runtime.placement import Placement
from mllm_compile.runtime.state import State
from tests import three_stages
from tests.layouts_of_ranks import LAYOUTS, assembled
from tests.layouts_of_ranks import train as train_under

ADAM = Optimizer("AdamW", lr=0.1)


def made(*, fill: float = 0.0, width: int = 3) -> tuple[State, torch.optim.Optimizer]:
    parameters = {
        "model.a.weight": nn.Parameter(torch.full((2, width), fill)),
        "model.b": nn.Parameter(torch.full((), fill)),
        "model.frozen": nn.Parameter(torch.full((4,), fill), requires_grad=False),
    }
    state = State(parameters, {"model.count": torch.tensor(int(fill)), "empty": torch.zeros(0, 2)})
    optimizer = make_optimizer(ADAM, parameters)
    assert optimizer is not None
    return state, optimizer


def train(state: State, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        for parameter in state.parameters.values():
            if parameter.requires_grad:
                parameter.grad = torch.rand_like(parameter)
        state.buffers["model.count"] = state.buffers["model.count"] + 1
        optimizer.step()


def tensors(state: State, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {**state.parameters, **state.buffers}
    for name, parameter in state.parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name} {key}"] = value
    return {name: value.detach().clone() for name, value in found.items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    torch.manual_seed(3)
    state, optimizer = made(fill=1.0)
    train(state, optimizer, 2)
    checkpoint.save(tmp_path, 2, state, optimizer, job={"samples": 16})
    at_two = tensors(state, optimizer)
    train(state, optimizer, 2)
    at_four = tensors(state, optimizer)

    torch.manual_seed(4)
    again, fresh = made()
    resumed = checkpoint.load(checkpoint.checkpoints(tmp_path)[-1], again, fresh)
    assert (resumed.step, resumed.job, resumed.random_restored) == (2, {"samples": 16}, True)
    assert same(tensors(again, fresh), at_two)
    train(again, fresh, 2)  # draws from the restored random state
    assert same(tensors(again, fresh), at_four)


@pytest.mark.parametrize("interrupted", ["write_tensors", "_describe"])
def test_a_half_written_checkpoint_is_never_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    state, optimizer = made()
    checkpoint.save(tmp_path, 1, state, optimizer)
    real = getattr(checkpoint, interrupted)

    def dies(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, interrupted, dies)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, 2, state, optimizer)
    assert (tmp_path / "step-00000002.partial").exists()
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000001"]
    checkpoint.save(tmp_path, 2, state, optimizer)
    names = [path.name for path in checkpoint.checkpoints(tmp_path)]
    assert names == ["step-00000001", "step-00000002"]


def test_the_previous_checkpoint_is_kept_and_older_ones_go(tmp_path: Path) -> None:
    state, optimizer = made()
    for step in (1, 2, 3, 100000000):
        checkpoint.save(tmp_path, step, state, optimizer)
    names = [path.name for path in checkpoint.checkpoints(tmp_path)]
    assert names == ["step-00000003", "step-100000000"]
    assert checkpoint.checkpoints(tmp_path / "nowhere") == []


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, *made())
    wider, _ = made(width=4)
    with pytest.raises(
        RequestError, match=r"parameter/model.a.weight: expected .*\[2, 4\], got .*\[2, 3\]"
    ):
        checkpoint.load(path, wider)
    more, _ = made()
    more.parameters["model.c"] = nn.Parameter(torch.zeros(1))
    with pytest.raises(RequestError, match=r"parameter/model.c: expected .*, got nothing"):
        checkpoint.load(path, more)


def test_any_split_can_be_loaded_under_any_other(tmp_path: Path) -> None:
    """Three ranks save, two ranks with other stages load it and save again, one process loads.

    All hold all buffers, but each of the three has updated one of its own.
    """
    three = {0: ("vision",), 1: ("tied",), 2: ("tied", "scale")}
    two = {0: ("tied", "vision"), 1: ("scale", "tied")}
    paths = [str(tmp_path / name) for name in ("three", "two")]
    expected: dict[str, torch.Tensor] = {}
    for source, target, split in ((None, paths[0], three), (paths[0], paths[1], two)):
        payload = {"source": source, "target": target, "split": split}
        results = launch("tests.rank_targets:checkpointed", payload, len(split))
        for rank, names in split.items():
            loaded = source is not None
            # A parameter, its two moments and step.
            assert len(results[rank]) == 4 * len(names) + 3 * loaded
            if not loaded:
                expected.update(results[rank])
                expected[f"count{rank}"] = torch.tensor(7 + rank)
            assert all(torch.equal(value, expected[key]) for key, value in results[rank].items())
    parameters = three_stages.model()
    state = State(parameters, {f"count{rank}": torch.tensor(0) for rank in three})
    optimizer = make_optimizer(ADAM, parameters)
    assert optimizer is not None
    for path in paths:
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.zero_()
        resumed = checkpoint.load(checkpoint.checkpoints(path)[-1], state, optimizer)
        assert resumed.step == 1
        assert same(tensors(state, optimizer), expected)


def test_a_job_goes_on_under_another_layout_as_if_it_had_stayed(tmp_path: Path) -> None:
    """Two of four steps under data 2 x tensor 2; the rest there, in a pipeline, on one rank."""

    def on_ranks(layout: str, num_ranks: int, **payload: object) -> dict[str, torch.Tensor]:
        parts = launch("tests.rank_targets:trained", {"layout": layout, **payload}, num_ranks)
        return assembled(layout, parts)

    def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
        assert one.keys() == two.keys()
        for key, value in one.items():
            torch.testing.assert_close(value, two[key], rtol=1e-12, atol=1e-15)

    wide, pipeline, one = LAYOUTS
    paths = [str(tmp_path / name) for name in ("wide", "pipeline", "one")]
    stayed = on_ranks(wide, 4, steps=4, save_after=1, target=paths[0])
    assert len(stayed) == 4 + 3 * 3
    equal(stayed, on_ranks(pipeline, 2, steps=2, source=paths[0], target=paths[1]))
    payload = {"layout": one, "steps": 2, "source": paths[0], "target": paths[2]}
    (alone,) = run_threads(1, lambda transport: train_under(transport, payload))
    equal(stayed, assembled(one, {0: alone}))
    equal(stayed, on_ranks(wide, 4, steps=0, source=paths[1]))
    equal(stayed, on_ranks(wide, 4, steps=0, source=paths[2]))


def test_a_part_of_another_model_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, *made())
    half = Holding.of((2, 4), (S(1, 1, 2),), (MeshAxis("tensor", 2),), (0,))
    rest = Holding.of((2, 4), (S(1, 1, 2),), (MeshAxis("tensor", 2),), (1,))
    placements = {"model.a.weight": Placement((2, 4), {0: half, 1: rest})}
    state = State({"model.a.weight": nn.Parameter(torch.zeros(2, 2))}, {}, placements)
    with pytest.raises(RequestError, match=r"model.a.weight: expected .*\[2, 4\], got .*\[2, 3\]"):
        checkpoint.load(path, state)
