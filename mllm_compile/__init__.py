"""A compiler over traced torch.fx graphs for distributed training of multimodal LLMs."""

from mllm_compile.compiler.errors import (
    CaptureError,
    CompileError,
    GuardError,
    PlanError,
    RequestError,
    RunError,
)
from mllm_compile.compiler.request import ModuleSpec, Optimizer, Parallel, Request
from mllm_compile.passes.capture.capture import capture
from mllm_compile.weights import load_weights
from mllm_compile.workload import Workload

__all__ = [
    "CaptureError",
    "CompileError",
    "GuardError",
    "ModuleSpec",
    "Optimizer",
    "Parallel",
    "PlanError",
    "Request",
    "RequestError",
    "RunError",
    "Workload",
    "capture",
    "load_weights",
]
