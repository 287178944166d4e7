"""Compare a program with the plain model: the loss and every parameter's gradient.

The reference is the unmodified model in one process on the whole global batch. The error of a
gradient g is ||g - ref|| / max(||ref||, 1e-5 ||all gradients||), 1e-3 in bfloat16: some gradients
are zero in exact arithmetic (a key projection's bias), and noise must not be compared with noise.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mllm_compile.compilation import Compiler, Step
from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.compiler.regions import Region, size
from mllm_compile.compiler.request import Request
from mllm_compile.model import load_workload, microbatches, pair, ready_model
from mllm_compile.passes.lower.lower import HOST
from mllm_compile.plain import reference
from mllm_compile.rank import Rank, joined
from mllm_compile.runtime.device import device_of
from mllm_compile.runtime.launch import launch, under_torchrun
from mllm_compile.runtime.local_transport import run_threads
from mllm_compile.runtime.measures import Measures
from mllm_compile.runtime.pieces import pack
from mllm_compile.runtime.rank_main import RankContext
from mllm_compile.workload import Workload

TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 5e-2}
FLOOR = {"float64": 1e-5, "float32": 1e-5, "bfloat16": 1e-3}

Gradients = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class RankResult:
    """What one rank computed in the verified step.

    ``gradients`` are those of its shards, ``regions`` says which elements they are; ``grad_norm``
    is that of the whole model. Of the ranks that share a data lane one has the lane's loss.
    """

    loss: torch.Tensor | None
    gradients: Gradients
    regions: Mapping[str, Region]
    grad_norm: float
    measures: Measures


@dataclass(frozen=True)
class Verification:
    """The comparison; ``as_dict`` is the contract of ``verify --json``."""

    tolerance: float
    eager_loss: float
    program_loss: float
    errors: Mapping[str, float]
    norm_error: float
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    measures: Sequence[Measures] = field(default_factory=tuple)

    @property
    def loss_error(self) -> float:
        """Relative error of the loss."""
        return abs(self.program_loss - self.eager_loss) / max(abs(self.eager_loss), 1e-30)

    @property
    def worst(self) -> str | None:
        """The parameter with the largest error."""
        return max(self.errors, key=self.errors.__getitem__, default=None)

    @property
    def max_error(self) -> float:
        """The largest relative error of a gradient."""
        return max(self.errors.values(), default=0.0)

    @property
    def passed(self) -> bool:
        """Every error within tolerance (a NaN is not), and the same set of gradients."""
        errors = (self.loss_error, self.norm_error, self.max_error, *self.errors.values())
        agree = all(error <= self.tolerance for error in errors)
        return agree and not self.missing and not self.unexpected

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, keys as documented in the README."""
        total = _total(self.measures)
        return {
            "passed": self.passed,
            "tolerance": self.tolerance,
            "loss": {
                "eager": self.eager_loss,
                "program": self.program_loss,
                "relative_error": self.loss_error,
            },
            "gradients": {
                "compared": len(self.errors),
                "max_relative_error": self.max_error,
                "norm_relative_error": self.norm_error,
                "worst": self.worst,
                "missing": list(self.missing),
                "unexpected": list(self.unexpected),
            },
            "messages": {"forward": total.messages_forward, "backward": total.messages_backward},
            "bytes": {"forward": total.bytes_forward, "backward": total.bytes_backward},
            "host_reads": total.host_reads,
            "peak_live_bytes_per_rank": [m.peak_live_bytes for m in self.measures],
        }


def verify(
    request: Request, workload: Workload | None = None, *, in_process: bool = False
) -> Verification:
    """Run one step of the program and of the plain model, and compare.

    Args:
        request: what to verify.
        workload: by default the request's own; ranks in processes of their own need that one.
        in_process: run all ranks as threads of this process.

    Raises:
        RequestError: the model draws random numbers, so that there is nothing to compare.

    """
    if workload is not None and not in_process:
        raise RequestError(
            explain(
                "verify",
                expected="a workload by name where ranks are processes",
                remedy="name it in the request, or verify in-process",
            )
        )
    if under_torchrun() and not in_process:
        raise RequestError(
            explain("verify", expected="to start its own ranks", remedy="run it without torchrun")
        )
    workload = workload or load_workload(request)
    model = ready_model(request, workload.model)
    plain = deepcopy(model)
    if in_process:
        results = _in_threads(request, model, workload)
    else:
        ranks = launch("mllm_compile.verify:rank_main", request, request.num_ranks)
        results = [ranks[rank] for rank in sorted(ranks)]
    return compare(request, results, *reference(request, plain, workload))


def compare(
    request: Request, results: Sequence[RankResult], loss: float, expected: Gradients
) -> Verification:
    """The verification of what the ranks computed; every shard and every replica counts."""
    norm = sum(float(g.double().norm()) ** 2 for g in expected.values()) ** 0.5
    differences = _differences(results, expected)
    gradients = {name for result in results for name in result.gradients}
    errors = {
        name: sum(parts.values()) ** 0.5
        / max(float(expected[name].double().norm()), FLOOR[request.dtype] * norm, 1e-300)
        for name, parts in differences.items()
        if sum(map(size, parts)) == expected[name].numel()
    }
    return Verification(
        tolerance=TOLERANCE[request.dtype],
        eager_loss=loss,
        program_loss=sum(float(result.loss) for result in results if result.loss is not None),
        errors=errors,
        norm_error=max((abs(r.grad_norm - norm) for r in results), default=0.0) / max(norm, 1e-300),
        missing=tuple(sorted(set(expected) - set(errors))),
        unexpected=tuple(sorted(gradients - set(expected))),
        measures=[result.measures for result in results],
    )


def _differences(
    results: Sequence[RankResult], expected: Gradients
) -> dict[str, dict[Region, float]]:
    """By parameter and shard: the squared norm of its difference, that of its worst replica."""
    found: dict[str, dict[Region, float]] = {}
    for result in results:
        for name, gradient in result.gradients.items():
            if name in expected:
                region = result.regions[name]
                difference = gradient.double() - pack(expected[name], region).double()
                parts = found.setdefault(name, {})
                # max of tensors, unlike that of floats, keeps a NaN
                squares = torch.stack(
                    [difference.square().sum(), torch.tensor(parts.get(region, 0.0))]
                )
                parts[region] = float(squares.max())
    return found


def rank_main(context: RankContext, request: Request) -> RankResult:
    """One rank's part of a verification, in a process of its own."""
    device = device_of(context.local_rank)
    workload = load_workload(request)
    compiler, step = _compiled(request, ready_model(request, workload.model), workload, device)
    with joined(context, device, compiler, step) as rank:
        return _rank_result(rank, step)


def _in_threads(request: Request, model: nn.Module, workload: Workload) -> Sequence[RankResult]:
    compiler, step = _compiled(request, model, workload)
    compiler.lower_all(step)  # tracing is for one thread at a time
    return run_threads(
        request.num_ranks,
        lambda transport: _rank_result(Rank(compiler, transport, private=True), step),
    )


def _compiled(
    request: Request,
    model: nn.Module,
    workload: Workload,
    device: torch.device = HOST,
) -> tuple[Compiler, Step]:
    compiler = Compiler(request, model, device)
    step = compiler.step(microbatches(request, workload, 0), pair(request, workload, 0))
    for plan in step.plans:
        for node in plan.captured.main.graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise RequestError(
                    explain(
                        f"{node.target} at {node.meta.get('where')}",
                        expected="a model without random numbers, to compare with the plain one",
                        remedy="set its dropout to 0 in the workload",
                    )
                )
    return compiler, step


def _rank_result(rank: Rank, step: Step) -> RankResult:
    result = rank.run(step, measure=True)
    losses = list(result.losses.values())
    loss = torch.stack(losses).sum().cpu() if losses else None
    gradients = {name: gradient.cpu() for name, gradient in rank.gradients().items()}
    norm = float(rank.state.grad_norm(rank.transport))
    return RankResult(loss, gradients, rank.regions, norm, result.measures)


def _total(measures: Sequence[Measures]) -> Measures:
    names = ("messages_forward", "messages_backward", "bytes_forward", "bytes_backward")
    total = Measures(**{name: sum(getattr(m, name) for m in measures) for name in names})
    total.host_reads = sum(m.host_reads or 0 for m in measures)
    return total
