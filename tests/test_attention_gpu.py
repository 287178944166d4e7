"""The Triton kernels against the definition, in Triton's interpreter, in a process of its own."""

import importlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec

import pytest

from tests.interval_masks import KINDS

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason='triton is not installed (pip install "triton>=3.6")'
)


def call(name, kwargs):
    getattr(importlib.import_module("tests.interpreter"), name)(**kwargs)


def ready():
    importlib.import_module("tests.interpreter")


@pytest.fixture(scope="module")
def interpreted():
    """Calls a function of ``tests/interpreter.py`` in the other process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "1")
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pool.submit(ready).result()
    with pool:
        yield lambda name, **kwargs: pool.submit(call, name, kwargs).result()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_mask(interpreted, kind):
    interpreted("agree", kind=kind, queries=153, keys=153)


@pytest.mark.parametrize(("queries", "keys"), [(57, 57), (90, 283), (283, 90), (1, 40), (40, 1)])
def test_lengths(interpreted, queries, keys):
    interpreted("agree", kind="random", queries=queries, keys=keys)
    interpreted("agree", kind=None, queries=queries, keys=keys, causal=True)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_groups(interpreted, group):
    interpreted("agree", kind="multimodal", queries=80, keys=80, heads=8, key_heads=8 // group)


@pytest.mark.parametrize(("size", "value_size"), [(40, 24), (72, 16), (16, 80), (32, 96), (256, 5)])
def test_head_sizes(interpreted, size, value_size):
    interpreted("agree", kind="packed", queries=70, keys=70, size=size, value_size=value_size)


@pytest.mark.parametrize(
    "extra",
    [
        {"mask": "whole"},
        {"mask": "padding", "causal": True},
        {"bias": "whole", "kind": None},
        {"bias": "padding", "mask": "heads"},
        {"softcap": 2.0},
        {"softcap": 2.0, "bias": "heads", "mask": "whole", "kind": "sink"},
    ],
    ids=str,
)
def test_masks_biases_and_caps(interpreted, extra):
    interpreted("agree", **{"kind": "packed", "queries": 90, "keys": 90, "batch": 2, **extra})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(interpreted, dtype):
    interpreted("agree", kind="multimodal", queries=90, keys=90, dtype=dtype, size=64)


def test_two_runs_are_equal_bit_by_bit(interpreted):
    interpreted("agree", kind="alone", queries=153, keys=153, heads=4, key_heads=2, repeat=True)


@pytest.mark.parametrize(
    "tiles",
    [
        {"forward": "32x16w4s2tma", "dq": "64x16w4s2tma", "dkv": "16x64w4s2tmaapart"},
        {"forward": "64x32w4s1", "dq": "16x32w4s1", "dkv": "32x16w4s1"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tilings_with_descriptors_and_without(interpreted, dtype, tiles):
    options = {"mask": "padding", "softcap": 2.0, "size": 24, "value_size": 20, "tiles": tiles}
    interpreted("agree", kind="sink", queries=70, keys=90, dtype=dtype, repeat=True, **options)


def test_strided_inputs(interpreted):
    interpreted("agree", kind="packed", queries=40, keys=40, strided=True)


@pytest.mark.parametrize("mask", ["causal", "packed_mm"])
def test_the_benchmark_finds_the_errors_of_the_kernels(interpreted, mask):
    interpreted("benchmarked", mask=mask)


@pytest.mark.parametrize("kind", ["multimodal", "alone"])
def test_context_parallel_ranks_are_one_rank(interpreted, kind):
    interpreted("context_parallel", kind=kind, length=160, ranks=2, unit=40)


def test_own_keys_first_and_remote_keys_merged(interpreted):
    interpreted("own_keys_first", kind="alone", length=150, split=70)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parts_in_low_precision_are_rounded_once(interpreted, dtype):
    interpreted("rounded_once", length=150, split=70, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("length", [57, 283, 335, 1000])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", [*KINDS, None])
def test_all_lengths_groups_and_kinds(interpreted, kind, group, length):
    heads = max(group, 2)
    options = {"kind": kind, "queries": length, "keys": length, "causal": kind is None}
    interpreted("agree", heads=heads, key_heads=heads // group, **options)


@pytest.mark.slow
@pytest.mark.parametrize("length", [57, 283, 335, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_all_lengths_and_kinds_in_bfloat16(interpreted, kind, length):
    options = {"kind": kind, "queries": length, "keys": length, "size": 64, "value_size": 64}
    interpreted("agree", dtype="bfloat16", repeat=length == 283, **options)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["packed", "multimodal", "alone", "window", "sink"])
def test_more_context_parallel_ranks(interpreted, kind, ranks):
    interpreted("context_parallel", kind=kind, length=512, ranks=ranks, unit=64)
    interpreted("own_keys_first", kind=kind, length=335, split=128)
