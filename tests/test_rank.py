"""A rank takes in what later programs ask of it."""

import pytest
import torch

from mllm_compile import rank as rank_module
from mllm_compile.compilation import Compiler
from mllm_compile.compiler.request import ModuleSpec, Optimizer, Request
from mllm_compile.model import load_workload, microbatches, ready_model
from mllm_compile.rank import Rank
from mllm_compile.runtime.local_transport import LocalTransport, run_threads
from mllm_compile.runtime.placement import Placement

MOVED = "model.multi_modal_projector.linear_1.weight"
REQUEST = Request(
    (
        ModuleSpec(("model.vision_tower", "model.multi_modal_projector"), (0,)),
        ModuleSpec(("model.language_model", "lm_head"), (1,)),
    ),
    workload="examples.llava:tiny",
    dtype="float64",
    optimizer=Optimizer("AdamW", lr=0.01),
)


@pytest.mark.parametrize("holders", [(1,), (0, 1)])
def test_a_parameter_comes_to_its_new_rank_as_trained(
    holders: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = load_workload(REQUEST)
    compiler = Compiler(REQUEST, ready_model(REQUEST, workload.model))
    step = compiler.step(microbatches(REQUEST, workload, 0))
    compiler.lower_all(step)
    first = dict(compiler.model.named_parameters())[MOVED].detach().clone()
    real = rank_module._placements

    def rank_main(transport: LocalTransport) -> tuple[Rank, torch.Tensor | None, dict]:
        rank = Rank(compiler, transport, private=True)
        rank.run(step)
        rank.update()
        transport.all_gather(torch.zeros(1))
        if transport.rank == 0:
            trained = rank.state.parameters[MOVED]
            kept = {key: value.clone() for key, value in rank.optimizer.state[trained].items()}
            monkeypatch.setattr(
                rank_module,
                "_placements",
                lambda *given: {
                    **real(*given),
                    MOVED: Placement.replicated(trained.shape, holders),
                },
            )
        transport.all_gather(torch.zeros(1))
        rank._settled = 0
        rank._settle()
        return (rank, trained.detach().clone(), kept) if transport.rank == 0 else (rank, None, {})

    (old, trained, kept), (new, _, _) = run_threads(2, rank_main)
    assert trained is not None
    assert not torch.equal(trained, first)
    assert kept
    arrived = new.state.parameters[MOVED]
    assert torch.equal(arrived, trained)
    assert new.optimizer.state[arrived].keys() == kept.keys()
    assert all(torch.equal(new.optimizer.state[arrived][key], kept[key]) for key in kept)
    assert any(arrived is p for group in new.optimizer.param_groups for p in group["params"])
    assert (MOVED in old.state.parameters) == (0 in holders)
    assert (MOVED in new.state.placements) == (len(holders) > 1)


def test_a_step_of_known_programs_is_compiled_from_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = load_workload(REQUEST)
    compiler = Compiler(REQUEST, ready_model(REQUEST, workload.model))
    first = compiler.step(microbatches(REQUEST, workload, 0))
    for analysis in ("richest", "variant_of", "make_plan", "make_schedule"):
        monkeypatch.delattr(f"mllm_compile.compilation.{analysis}")
    again = compiler.step(microbatches(REQUEST, workload, 0))
    assert again.plans == first.plans
    assert again.schedule is first.schedule
