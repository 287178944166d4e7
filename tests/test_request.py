"""Requests from TOML: overrides, and the faults a user can make."""

import pytest

from mllm_compile.compiler.errors import RequestError
from mllm_compile.compiler.overrides import override
from mllm_compile.compiler.request import ModuleSpec, Parallel, Request

GOOD = """
workload = "somewhere:workload"
microbatches = 2
[optimizer]
lr = 1e-2
[[module]]
path = "encoder"
ranks = 0
trainable = false
[[module]]
path = ["projector", "decoder"]
ranks = "1-2"
pipeline = 2
"""


def load(tmp_path, text: str, *overrides: str) -> Request:
    path = tmp_path / "request.toml"
    path.write_text(text)
    return Request.load(path, overrides)


def test_overrides_reach_every_key(tmp_path) -> None:
    request = load(
        tmp_path,
        GOOD,
        "microbatches=8",
        "optimizer.lr=1e-3",
        "module.1.ranks='1-4'",
        "module.1.pipeline=4",
        "dtype=float64",
        "compile=inductor",
    )
    assert (request.microbatches, request.optimizer.lr, request.dtype) == (8, 1e-3, "float64")
    assert request.modules[1].ranks == (1, 2, 3, 4)
    assert request.compile == "inductor"


def test_an_override_leaves_the_table_alone() -> None:
    table = {"optimizer": {"lr": 1.0}}
    assert override(table, ["optimizer.lr=2", "new.key=true"]) == {
        "optimizer": {"lr": 2},
        "new": {"key": True},
    }
    assert table == {"optimizer": {"lr": 1.0}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("microbatches", "like microbatches=8"),
        ("=8", "like microbatches=8"),
        ("microbatch=8", "key 'microbatch'"),
        ("module.2.pipeline=4", "number below 2"),
        ("module.first.pipeline=4", "number below 2"),
        ("workload.x=1", "no further key"),
        ("microbatches=0", "a whole number >= 1"),
        ("microbatches=true", "a whole number >= 1"),
        ("optimizer.lr=fast", "a number >= 0"),
        ("optimizer=fast", "a table"),
        ("module=1", r"\[\[module\]\] tables"),
        ("module.0=1", "a dotted path"),
        ("module.0.path=1", "a dotted path"),
        ("module.0.ranks=1.5", "like '0-1,4'"),
        ("module.0.ranks=zero", "like '0-1,4'"),
        ("module.0.trainable=no", "true or false"),
        ("module.0.trainable=1", "true or false"),
        ("optimizer.lr=nan", "a number >= 0"),
        ("optimizer.weight_decay=true", "a number >= 0"),
        ("workload=3", "package.module:function"),
        ("module.0.ranks=1", "without a gap"),
        ("module.0.ranks='0,5'", "the product of its sizes"),
        ("module.0.tensors=2", "key 'tensors'"),
    ],
)
def test_a_fault_names_file_key_and_expectation(tmp_path, change: str, message: str) -> None:
    with pytest.raises(RequestError, match=rf"request\.toml: .*{message}"):
        load(tmp_path, GOOD, change)


@pytest.mark.parametrize("text", ["x = ", "\N{SNOWMAN}", '[module]\npath = "a"', ""])
def test_bad_files_name_themselves(tmp_path, text: str) -> None:
    with pytest.raises(RequestError, match=r"request\.toml"):
        load(tmp_path, text)


def test_missing_and_binary_files_name_themselves(tmp_path) -> None:
    with pytest.raises(RequestError, match="nowhere"):
        Request.load(tmp_path / "nowhere.toml")
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="binary"):
        Request.load(path)


def test_modules_may_share_ranks() -> None:
    request = Request(
        (
            ModuleSpec(("encoder",), (0, 1), Parallel(data=2)),
            ModuleSpec(("llm",), (0, 1), Parallel(tensor=2)),
        ),
        microbatch_size=2,
    )
    assert request.num_ranks == 2
    assert request.lane_counts == (1, 2)


def test_more_lanes_than_samples_are_refused() -> None:
    with pytest.raises(RequestError, match="data: expected at most 1, the samples"):
        Request((ModuleSpec(("m",), (0, 1), Parallel(data=2)),), microbatch_size=1)


@pytest.mark.parametrize("ranks", ["2-1", "1-", "[1.5, 2]", "true"])
def test_ranks_that_name_none_are_refused(tmp_path, ranks) -> None:
    with pytest.raises(RequestError, match="ranks: expected"):
        load(tmp_path, GOOD, f"module.1.ranks={ranks}", "module.1.pipeline=1")


def test_a_seed_is_a_number(tmp_path) -> None:
    with pytest.raises(RequestError, match="seed: expected a whole number, got 'x'"):
        load(tmp_path, GOOD, "seed=x")


@pytest.mark.parametrize(
    ("wrong", "legal"), [("module.1.tensr=2", "'path', 'ranks', 'tensor'"), ("modul=2", "'module'")]
)
def test_an_unknown_key_is_answered_with_all_keys(tmp_path, wrong, legal) -> None:
    with pytest.raises(RequestError, match=legal):
        load(tmp_path, GOOD, wrong)
