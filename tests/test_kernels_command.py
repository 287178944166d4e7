"""Compiling the Triton kernels without a GPU: what they take, what is refused, the command."""

import json
from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

from mllm_compile import cli
from mllm_compile.kernels.attention.gpu import table
from mllm_compile.kernels.attention.site import Site

LLAVA = str(Path(__file__).parent.parent / "examples" / "llava.toml")

KINDS = tuple(product((1, 2), (False, True), (False, True), (False, True)))

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason='triton is not installed (pip install "triton>=3.6")'
)


@pytest.fixture
def compiler():
    from mllm_compile.kernels.attention.gpu import ahead_of_time

    return ahead_of_time


def variant(compiler, kernel, target, dtype, size, config=None, **kinds):
    site = Site(dtype, size, size, **kinds)
    config = config or table.configs(kernel, target, site)[0]
    return compiler.Variant(kernel, target, dtype, config, table.spec_of(config, target, site))


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

    def faults(target="sm90", products=True, descriptors=True, **change):
        taken = replace(sound, **change)
        return taken.faults(target, products=products, descriptors=descriptors)

    assert faults() == []
    for change, word in (
        ({"stack": 8}, "8 bytes of stack"),
        ({"spills": 3}, "3 spills"),
        ({"shared": 228 << 10}, "228 KiB shared of 227"),
        ({"matrix": {"HMMA": 0, "HGMMA": 0}}, "no HGMMA"),
        ({"descriptor_loads": 0}, "no descriptor load"),
        ({"atomics": 1}, "1 atomics"),
    ):
        assert faults(**change) == [word]
    assert faults(matrix={"HMMA": 8, "HGMMA": 8}) == ["8 older than HGMMA"]
    assert faults(matrix={"HMMA": 0}, products=False) == []
    assert faults("sm80", matrix={"HMMA": 0}) == ["no HMMA"]
    assert faults("sm80", matrix={"HMMA": 8}) == []
    assert faults("sm100", matrix={"UTCHMMA": 0, "HMMA": 0}) == ["no UTCHMMA or HMMA"]
    assert faults(descriptor_loads=0, descriptors=False) == []


def test_every_target_size_and_kind_has_configurations():
    for target, (dtype, sizes), kinds in product(
        table.TARGETS,
        {"bfloat16": (16, 40, 64, 72, 128, 192, 256), "float32": (20, 40, 128)}.items(),
        KINDS,
    ):
        for size in sizes:
            for kernel in ("forward", "dq", "dkv"):
                configs = table.configs(kernel, target, Site(dtype, size, size, *kinds))
                assert configs
                assert {config.descriptors for config in configs} == {target in ("sm90", "sm100")}


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

    assert _left(Site("bfloat16", 256, 64)) == ""
    assert _left(Site("bfloat16", 64, 257)) == "head size 257 in bfloat16 exceeds 256"
    assert _left(Site("float32", 128, 64)) == ""
    dense = "head size 65 in float32 with a dense mask, a bias or a cap exceeds 64"
    assert _left(Site("float32", 64, 65, mask=True)) == dense
    assert _left(Site("float32", 65, 64, softcap=True)) == dense


@pytest.mark.slow
@pytest.mark.parametrize("target", table.TARGETS)
def test_odd_head_sizes_have_sound_kernels(compiler, target):
    sites = Site("float32", 20, 24), Site("bfloat16", 80, 72, 2, mask=True), Site("float16", 16, 40)
    for site in sites:
        faults = defaultdict(lambda: defaultdict(list))
        for each in map(compiler.compile_variant, compiler.of_site(target, site)):
            faults[each.variant.kernel][each.variant.config] += each.faults
        for kernel, configs in faults.items():  # a launch takes the sound ones
            assert [] in configs.values(), (kernel, dict(configs))


@pytest.mark.slow
@pytest.mark.parametrize("target", table.TARGETS)
def test_the_shipped_table_takes_what_it_took(compiler, golden, request, target):
    """Of each configuration, over all kinds of sites: none has a fault, and the most that it takes.

    The kinds are one and two intervals, and with two and a cap a dense mask or a bias.
    """
    import triton

    version = ".".join(triton.__version__.split(".")[:2])
    name = f"kernels-triton-{version}-{target}.txt"
    updating = request.config.getoption("--update-golden")
    if not updating and not (request.path.parent / "golden" / name).exists():
        pytest.skip(f"no figures of triton {version}; other versions allocate other registers")
    taken = defaultdict(list)
    for each in map(compiler.compile_variant, compiler.shipped(target)):
        assert each.faults == [], each.variant.name
        variant = each.variant
        row = variant.written, target, variant.dtype, str(variant.spec.size), variant.config
        taken[row].append(each)
    golden(name, "\n".join(_line(row, done) for row, done in taken.items()))


def _line(row, done):
    taken = [each.resources for each in done]
    kinds = ", ".join(each.variant.kind for each in done)
    matrix = " ".join(name for name in taken[0].matrix if all(x.matrix[name] for x in taken))
    figures = {
        "registers": max(x.registers for x in taken),
        "stack": max(x.stack for x in taken),
        "spills": max(x.spills for x in taken),
        "shared": max(x.shared for x in taken),
        "descriptor loads": max(x.descriptor_loads for x in taken),
        "atomics": max(x.atomics for x in taken),
    }
    figures = ", ".join(f"{count} {what}" for what, count in figures.items())
    return f"{' '.join(map(str, row))} ({kinds}): {figures}, {matrix or 'no products'}"
