"""The wheel: what is in it, and that it works away from the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_cache")

IMPORT_EVERYTHING = """
import pkgutil, importlib, pathlib, mllm_compile
root = pathlib.Path(mllm_compile.__file__).parent
names = sorted(".".join(("mllm_compile", *p.relative_to(root).with_suffix("").parts))
               for p in root.rglob("*.py") if p.name not in ("__init__.py", "__main__.py"))
for name in names:
    importlib.import_module(name)
print(root)
"""


@pytest.mark.slow
def test_wheel_holds_the_package_alone_and_works_elsewhere(tmp_path: Path) -> None:
    source, wheels, target = (tmp_path / name for name in ("source", "wheels", "target"))
    shutil.copytree(ROOT, source, symlinks=True, ignore=LEFT_OUT)
    build = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w"]
    subprocess.run([sys.executable, "-m", *build, wheels, source], check=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    product = {
        f"mllm_compile/{path.relative_to(ROOT)}"
        for room in ("compiler", "passes", "kernels", "runtime")
        for path in (ROOT / room).rglob("*.py")
    }
    assert {name.partition("/")[0] for name in names} == {"mllm_compile"}
    assert "mllm_compile/py.typed" in names
    assert product <= set(names)

    def run(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(target)}
        command = [sys.executable, "-P", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        ).stdout

    assert run("-c", IMPORT_EVERYTHING).strip() == str(target / "mllm_compile")
    assert "verify" in run("-m", "mllm_compile", "--help")
