"""Compiling the Triton kernels without a GPU: what they take, what is refused, the command."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from mllm_compile import cli
from mllm_compile.kernels.attention.gpu import table

LLAVA = str(Path(__file__).parent.parent / "examples" / "llava.toml")

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason='triton is not installed (pip install "triton>=3.6")'
)


@pytest.fixture
def compiler():
    from mllm_compile.kernels.attention.gpu import ahead_of_time

    return ahead_of_time


def variant(compiler, kernel, target, dtype, size, config=None, **kinds):
    bits = 32 if dtype == "float32" else 16
    config = config or table.configs(target, kernel, bits, size)[0]
    spec = compiler.spec_of(config, target, compiler.Site(dtype, size, size, **kinds))
    return compiler.Variant(kernel, target, dtype, config, spec)


@pytest.mark.parametrize("target", table.TARGETS)
def test_one_kernel_of_every_target(compiler, target):
    done = compiler.compile_variant(variant(compiler, "forward", target, "bfloat16", 64))
    assert done.faults == []
    assert (done.resources.stack, done.resources.spills, done.resources.atomics) == (0, 0, 0)
    names = {"ptx", "cubin"} if target.startswith("sm") else {"amdgcn", "hsaco"}
    assert names <= set(done.stages)
    assert ("HGMMA" in done.resources.matrix and done.resources.matrix["HGMMA"] > 0) == (
        target == "sm90"
    )
    assert (done.resources.descriptor_loads > 0) == (target in ("sm90", "sm100"))


@pytest.mark.slow
def test_a_configuration_that_spills_is_refused(compiler):
    config = table.Config(128, 64, 4, 3)
    done = compiler.compile_variant(
        variant(compiler, "forward", "sm90", "bfloat16", 128, config=config)
    )
    assert done.resources.stack > 0
    assert any("stack" in fault for fault in done.faults)


def test_every_fault_has_its_name():
    from mllm_compile.kernels.attention.gpu.resources import Resources

    sound = Resources(200, 0, 0, {"HMMA": 0, "HGMMA": 8}, 4, 0, 100 << 10)
    assert sound.faults("sm90", own_matrix=True, descriptors=True) == []
    for change, word in (
        ({"stack": 8}, "8 bytes of stack"),
        ({"spills": 3}, "3 spills"),
        ({"shared": 228 << 10}, "228 KiB shared of 227"),
        ({"matrix": {"HMMA": 8, "HGMMA": 0}}, "no HGMMA"),
        ({"descriptor_loads": 0}, "no descriptor load"),
        ({"atomics": 1}, "1 atomics"),
    ):
        assert replace(sound, **change).faults("sm90", own_matrix=True, descriptors=True) == [word]
    assert (
        replace(sound, matrix={"HMMA": 8, "HGMMA": 0}).faults(
            "sm90", own_matrix=False, descriptors=True
        )
        == []
    )
    assert replace(sound, matrix={"HMMA": 0}).faults("sm80", own_matrix=True, descriptors=True) == [
        "no matrix instruction"
    ]
    assert (
        replace(sound, descriptor_loads=0).faults("sm90", own_matrix=True, descriptors=False) == []
    )


def test_every_target_and_size_has_configurations():
    for target in table.TARGETS:
        for bits, sizes in ((16, (16, 40, 64, 72, 128, 192, 256)), (32, (40, 128))):
            for size in sizes:
                for kernel in ("forward", "dq", "dkv"):
                    configs = table.configs(target, kernel, bits, size)
                    assert any(not config.descriptors for config in configs), (target, kernel)
    assert (table.largest(16), table.largest(32)) == (256, 128)


def test_targets_of_devices():
    named = {80: "sm80", 86: "sm80", 89: "sm80", 90: "sm90", 100: "sm100", 103: "sm100"}
    assert {arch: table.target_of("cuda", arch) for arch in named} == named
    assert table.target_of("hip", "gfx942") == "gfx942"
    with pytest.raises(RuntimeError, match=r"8\.0"):
        table.target_of("cuda", 75)


def test_the_command_writes_its_table_its_record_and_its_files(
    compiler, monkeypatch, tmp_path, capsys
):
    one = variant(compiler, "forward", "gfx942", "bfloat16", 64)
    monkeypatch.setattr(compiler, "shipped", lambda target: [one])
    record, files = tmp_path / "out.json", tmp_path / "files"
    arguments = ["kernels", "--target", "gfx942", "--json", str(record), "--output", str(files)]
    assert cli.main(arguments) == 0
    assert "MFMA" in capsys.readouterr().out
    (entry,) = json.loads(record.read_text())
    assert (entry["kernel"], entry["stack"], entry["faults"]) == ("forward", 0, [])
    suffixes = {path.name.removeprefix(one.name) for path in files.iterdir()}
    assert {".source", ".amdgcn", ".hsaco"} <= suffixes


def test_the_command_fails_for_a_configuration_that_is_refused(compiler, monkeypatch):
    one = variant(compiler, "forward", "gfx942", "bfloat16", 64)
    done = compiler.compile_variant(one)
    broken = replace(done, resources=replace(done.resources, spills=1))
    monkeypatch.setattr(compiler, "shipped", lambda target: [one])
    monkeypatch.setattr(compiler, "compile_variant", lambda variant: broken)
    assert cli.main(["kernels", "--target", "gfx942"]) == 1


def test_unknown_targets_are_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["kernels", "--target", "sm70"])
    assert stopped.value.code == 2
    assert "sm70" in capsys.readouterr().err


def test_the_kernels_of_a_request_are_those_of_its_sites(compiler, monkeypatch, tmp_path):
    done = compiler.compile_variant(variant(compiler, "forward", "gfx942", "bfloat16", 64))
    monkeypatch.setattr(compiler, "compile_variant", lambda variant: replace(done, variant=variant))
    record = tmp_path / "out.json"
    arguments = ["kernels", LLAVA, "--set", "dtype=bfloat16", "--target", "gfx942"]
    assert cli.main([*arguments, "--json", str(record)]) == 0
    sizes = {entry["size"] for entry in json.loads(record.read_text())}
    assert sizes == {16}


def test_the_kernels_of_a_plan_are_those_of_its_request(compiler, monkeypatch, tmp_path):
    done = compiler.compile_variant(variant(compiler, "forward", "gfx942", "bfloat16", 64))
    monkeypatch.setattr(compiler, "compile_variant", lambda variant: replace(done, variant=variant))
    plan, kernels = str(tmp_path / "plan.json"), []
    assert cli.main(["plan", LLAVA, "--set", "dtype=bfloat16", "-o", plan]) == 0
    for at in ([plan], [LLAVA, "--set", "dtype=bfloat16"]):
        record = tmp_path / "out.json"
        assert cli.main(["kernels", *at, "--target", "gfx942", "--json", str(record)]) == 0
        kernels.append(json.loads(record.read_text()))
    assert kernels[0] == kernels[1]
    assert {entry["kernel"] for entry in kernels[0]} >= {"forward", "dq", "dkv"}


def test_a_plan_is_taken_as_it_is(compiler, tmp_path, capsys):
    plan = str(tmp_path / "plan.json")
    assert cli.main(["plan", LLAVA, "-o", plan]) == 0
    for command in ("kernels", "inspect"):
        assert cli.main([command, plan, "--set", "dtype=bfloat16"]) == 2
        assert "--set dtype=bfloat16" in capsys.readouterr().err


def test_a_request_in_float64_has_no_kernels(compiler, capsys):
    assert cli.main(["kernels", LLAVA, "--target", "gfx942"]) == 2
    shown = capsys.readouterr()
    assert "dtype=bfloat16" in shown.err
    assert "by definition: float64 is none of" in shown.out


def test_heads_that_are_too_wide_are_told():
    from mllm_compile.commands_kernels import _left
    from mllm_compile.kernels.attention.kernel import Site

    assert _left(Site("bfloat16", 256, 64)) == ""
    assert _left(Site("bfloat16", 64, 257)) == "head size 257 in bfloat16 exceeds 256"


@pytest.mark.slow
def test_the_shipped_table_takes_what_it_took(compiler, golden, request):
    import triton

    version = ".".join(triton.__version__.split(".")[:2])
    name = f"kernels-triton-{version}.txt"
    updating = request.config.getoption("--update-golden")
    if not updating and not (request.path.parent / "golden" / name).exists():
        pytest.skip(f"no figures of triton {version}; other versions allocate other registers")
    lines = []
    for target in table.TARGETS:
        for each in map(compiler.compile_variant, compiler.shipped(target)):
            assert each.faults == [], each.variant.name
            taken = each.resources
            matrix = " ".join(f"{count} {kind}" for kind, count in taken.matrix.items() if count)
            lines.append(
                f"{each.variant.name}: {taken.registers} registers, {taken.stack} stack, "
                f"{taken.spills} spills, {taken.shared} shared, {matrix}, "
                f"{taken.descriptor_loads} descriptor loads, {taken.atomics} atomics"
            )
    golden(name, "\n".join(lines))
