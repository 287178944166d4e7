"""The laws of the repository itself: links, imports, sizes, no knowledge of any model."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("compiler", "passes", "kernels", "runtime")
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 40  # without the docstring

# Who may import which room, and which distributions beside the standard library.
MAY_IMPORT = {
    "compiler": ({"compiler"}, {"torch", "sympy", "networkx"}),
    "kernels": ({"kernels", "compiler"}, {"torch", "triton", "sympy"}),
    "passes": (
        {"passes", "compiler", "kernels"},
        {"torch", "sympy", "networkx", "numpy", "scipy", "transformers"},
    ),
    "runtime": ({"runtime", "compiler", "kernels"}, {"torch", "numpy"}),
    "mllm_compile": (
        {*ROOMS, "mllm_compile"},
        {"torch", "sympy", "networkx", "numpy", "rich", "transformers"},
    ),
}
MODEL_NAMES = re.compile(
    r"llava|qwen|gemma|internvl|smolvlm|idefics|glm\d|kimi|mistral|pixtral|whisper|siglip|flamingo"
    r"|phi[34]|llama|aya_?vision|deepseek|molmo|fuyu|blip|paligemma|clipvision|clip_vision|dinov",
    re.IGNORECASE,
)


def product_files() -> list[Path]:
    """Every Python file of the product, by its real path."""
    rooms = (path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return sorted([*rooms, *(ROOT / "mllm_compile").glob("*.py")])


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module == "mllm_compile":
                yield from ((node.lineno, f"mllm_compile.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def forbidden_imports(room: str, source: str) -> list[str]:
    """The imports of ``source`` that a file of ``room`` must not have."""
    rooms, packages = MAY_IMPORT[room]
    wrong = []
    for line, name in imports(ast.parse(source)):
        top, _, rest = name.partition(".")
        part = rest.partition(".")[0]
        if top in sys.stdlib_module_names or top in packages:
            continue
        if top == "mllm_compile" and (part if part in ROOMS else top) in rooms:
            continue
        wrong.append(f"line {line}: {name}")
    return wrong


def long_functions(source: str) -> list[str]:
    """Functions of more than the allowed lines, docstrings not counted."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            first = node.body[0]
            if ast.get_docstring(node) is not None:
                lines -= (first.end_lineno or 0) - first.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found.append(f"line {node.lineno}: {node.name} has {lines} lines")
    return found


def model_names(source: str) -> list[str]:
    """Names of model families in identifiers and strings; docstrings and comments are prose."""
    tree = ast.parse(source)
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in prose:
            continue
        for value in ast.iter_fields(node):
            text = value[1]
            if isinstance(text, str) and MODEL_NAMES.search(text):
                found.append(f"line {getattr(node, 'lineno', '?')}: {text}")
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_a_link_without_init(room: str) -> None:
    link = ROOT / "mllm_compile" / room
    assert link.is_symlink(), (
        f"{link} is not a link; repair it with: "
        f"cd mllm_compile && rm -rf {room} && ln -s ../{room} {room}"
    )
    assert os.readlink(link) == f"../{room}"
    assert (ROOT / room / "README.md").is_file()
    assert [str(path) for path in (ROOT / room).rglob("__init__.py")] == []


@pytest.mark.parametrize("path", product_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_file_keeps_the_laws(path: Path) -> None:
    source = path.read_text()
    assert forbidden_imports(room_of(path), source) == []
    assert long_functions(source) == []
    assert model_names(source) == []
    assert len(source.splitlines()) <= MAX_FILE_LINES


def test_imports_of_other_rooms_are_found() -> None:
    source = "from mllm_compile.runtime.launch import launch\nimport rich\nimport kernels\n"
    assert len(forbidden_imports("passes", source)) == 3
    assert forbidden_imports("runtime", source.splitlines()[0]) == []
    assert forbidden_imports("compiler", "from mllm_compile import workload") != []
    assert forbidden_imports("compiler", "def f():\n    import mllm_compile.kernels.op") != []
    assert forbidden_imports("kernels", "from torch.nn import functional") == []


def test_long_functions_are_found() -> None:
    body = "    x = 1\n" * MAX_FUNCTION_LINES
    assert long_functions(f"def f():\n{body}") == ["line 1: f has 41 lines"]
    assert long_functions(f'def f():\n    """Doc."""\n{body[10:]}') == []


def test_model_names_are_found() -> None:
    assert model_names('"""LLaVA is an example."""\nx = 1  # as in Qwen2-VL\n') == []
    assert model_names('if name == "llava":\n    pass\n') != []
    assert model_names("from transformers.models.qwen2_vl import x\n") != []
    assert model_names("optimizer.clip_norm = 1.0\n") == []


def run_from_the_root(program: str) -> None:
    """``python -c`` from the root has the root on sys.path, as ``python -m pytest`` has."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_transformers_does_not_take_our_kernels_for_the_published_package() -> None:
    pytest.importorskip("transformers")
    run_from_the_root(
        "import sys, transformers, transformers.integrations.hub_kernels\n"
        "found = sys.modules.get('kernels')\n"
        "assert getattr(found, '__file__', None) is None, found\n"
    )


def test_the_published_kernels_package_beats_our_folder(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("published = True\n")
    run_from_the_root(
        f"import sys; sys.path.append({str(tmp_path)!r})\nimport kernels; assert kernels.published"
    )
