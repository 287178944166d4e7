"""Requests over the zoo, and verification of them."""

from copy import deepcopy
from functools import cache

from torch.nn.functional import pad

from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.verify import Verification, verify
from mllm_compile.workload import Workload
from tests.families import FAMILIES, MODULES
from tests.samples import PER_TOKEN


@cache
def _built(name: str) -> Workload:
    return FAMILIES[name]()


def workload_of(name: str) -> Workload:
    """A fresh copy of a family's workload."""
    built = _built(name)
    return Workload(deepcopy(built.model), built.samples, built.collate)


def evenly(workload: Workload) -> Workload:
    """The same model on samples of one length, so that every microbatch fits one program."""
    length = max(len(sample["input_ids"]) for sample in workload.samples)
    samples = [
        {
            name: pad(value, (0, length - len(value)), value=PER_TOKEN[name])
            if name in PER_TOKEN
            else value
            for name, value in sample.items()
        }
        for sample in workload.samples
    ]
    return Workload(workload.model, samples, workload.collate)


def request_of(
    paths, pipelines, *, trainable=None, microbatches=4, size=2, dtype="float64", **keys
) -> Request:
    """Modules on ranks of their own, one after another."""
    modules, first = [], 0
    trainable = trainable or [None] * len(paths)
    for module, pipeline, train in zip(paths, pipelines, trainable, strict=True):
        ranks = tuple(range(first, first + pipeline))
        modules.append(ModuleSpec(module, ranks, Parallel(pipeline=pipeline), train))
        first += pipeline
    return Request(
        tuple(modules), microbatches=microbatches, microbatch_size=size, dtype=dtype, **keys
    )


def verified(name: str, pipelines=None, *, workload=None, paths=None, **keys) -> Verification:
    """Verify a family in-process; by default even samples, two ranks for the last module."""
    paths = paths or MODULES[name]
    pipelines = pipelines or [*[1] * (len(paths) - 1), 2]
    workload = workload or evenly(workload_of(name))
    return verify(request_of(paths, pipelines, **keys), workload, in_process=True)


def assert_passed(result: Verification) -> None:
    """Loss and every gradient agree, and there were gradients to compare."""
    assert result.passed, result.as_dict()
    assert result.errors
    assert result.as_dict()["host_reads"] == 0
