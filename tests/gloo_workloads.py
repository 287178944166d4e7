"""Workloads that ranks in processes of their own find by name."""

from functools import partial

from mllm_compile.workload import Workload
from tests.families import FAMILIES
from tests.masked_decoder import workload as masked_workload
from tests.parity import evenly, workload_of


def llava() -> Workload:
    """LLaVA on samples of one length."""
    return evenly(workload_of("llava"))


def vision_audio_llm() -> Workload:
    """Two encoders before one language model, on samples of one length."""
    return evenly(workload_of("vision_audio_llm"))


def masked() -> Workload:
    """Packed documents with images that see themselves whole, under four key heads of eight."""
    return masked_workload("images", 4, (23, 23))


globals().update({f"ragged_{name}": partial(workload_of, name) for name in FAMILIES})
"""Every family of the zoo as it is: samples of different lengths."""
