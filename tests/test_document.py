"""Plans as data and as tables."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from mllm_compile.compiler.errors import RequestError
from mllm_compile.document import Document
from mllm_compile.quantities import count, numbers, share, size
from mllm_compile.render import actions_of, holds, module_table, plan_view, traffic
from mllm_compile.render_graph import explain_node, graph_view, rank_view
from mllm_compile.render_schedule import schedule_grid
from tests.plans import make


@pytest.fixture
def document() -> Document:
    return Document.of(*make())


def text(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=160, color_system=None)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_json_is_exact_in_both_directions(document: Document) -> None:
    written = document.to_json()
    assert Document.from_json(written) == document
    assert Document.from_json(written).to_json() == written


def test_an_unfinished_plan_is_a_document_too() -> None:
    plan, model = make()
    early = replace(plan, stages=(), boundaries=(), schedule=None, home={}, module_of={})
    document = Document.of(early, model)
    assert Document.from_json(document.to_json()) == document
    assert "encoder" in text(plan_view(document))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 99}', '{"format": 2}'])
def test_other_files_are_refused(tmp_path, content: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(RequestError, match=r"plan\.json.*plan -o"):
        Document.load(path)


def test_every_parameter_is_accounted_for_once(document: Document) -> None:
    model = make()[1]
    assert sorted(p.name for p in document.parameters) == sorted(
        name for name, _ in model.named_parameters()
    )
    rows = list(zip(*(list(c.cells) for c in module_table(document).columns), strict=True))
    assert [row[4] for row in rows] == ["16", "24", "-", "40"]
    assert [row[3] for row in rows] == ["no", "yes", "", "60%"]


def test_stages_say_what_they_do_and_why(document: Document) -> None:
    assert [actions_of(document, stage)[0] for stage in document.stages] == ["F", "F W", "F I W"]
    assert [holds(document, stage) for stage in document.stages] == [
        "encoder",
        "decoder.0",
        "decoder.1",
    ]


def test_weights_that_cost_nothing_are_trained_too() -> None:
    plan, model = make()
    free = Document.of(replace(plan, costs={}), model)
    assert [actions_of(free, stage)[0] for stage in free.stages] == ["F", "F W", "F I W"]
    frozen = Document.of(replace(plan, needs_grad=frozenset()), model)
    assert actions_of(frozen, frozen.stages[1])[0] == "F"


def test_traffic_counts_gradients_only_where_they_flow(document: Document) -> None:
    assert traffic(document, document.boundaries) == (96, 48)


def test_glue_and_copies_are_shown(document: Document) -> None:
    shown = text(plan_view(document))
    assert "first stage that uses it" in shown
    assert "inputs alone decide it" in shown
    assert "note: not hoisted: helper: it reads a parameter" in shown


def test_explain_tells_place_reason_and_cost(document: Document) -> None:
    relu = text(explain_node(document, "%relu"))
    assert "computed from inputs alone" in relu
    assert "no trained parameter is upstream" in relu
    mul = text(explain_node(document, "mul"))
    assert "stage 1 (rank 1): no module of the request owns it" in mul
    assert "model.py:5 forward" in mul
    mm_1 = text(explain_node(document, "mm_1"))
    assert "stage 1 -> stage 2, its gradient comes back" in mm_1
    assert "yes, through w1" in mm_1
    assert "F 96, dI -, dW 96" in mm_1
    assert "mm_2: mm -> float32[3,2], stage 2" in mm_1
    with pytest.raises(RequestError, match="names like it: mm, mul, mm_1, mm_2"):
        explain_node(document, "m")


def test_graph_and_rank_views(document: Document) -> None:
    assert "mm_2" not in text(graph_view(document, "encoder"))
    with pytest.raises(RequestError, match="owner of a node"):
        graph_view(document, "nowhere")
    shown = text(rank_view(document, 0))
    assert "0F0 0SEND_F0>1" in shown
    assert "mm_2" not in shown
    with pytest.raises(RequestError, match="one of"):
        rank_view(document, 7)


def test_quantities() -> None:
    assert [count(n) for n in (0, 7, 999, 1000, 12345, 999_999, 10**9)] == [
        "-",
        "7",
        "999",
        "1 k",
        "12.3 k",
        "1 M",
        "1 G",
    ]
    assert [size(n) for n in (0, 48, 1024, 3 * 2**20)] == ["-", "48 B", "1 KiB", "3 MiB"]
    assert share(1, 3) == "33%"


def test_the_grid_shows_every_compute_action_once(document: Document) -> None:
    shown = schedule_grid(document, 120).plain
    rows = [line.split() for line in shown.splitlines() if line.strip()[:2] in ("0 ", "1 ", "2 ")]
    done = {int(row[0]): [cell for cell in row[1:] if cell != "."] for row in rows}
    assert {
        rank: [str(a)[1:] for a in actions if a.peer is None]
        for rank, actions in document.schedule.actions.items()
    } == done
    assert rows[1][1:3] == [".", "F0"]


def test_a_narrow_grid_is_folded(document: Document) -> None:
    wide, narrow = schedule_grid(document, 120).plain, schedule_grid(document, 20).plain
    assert max(map(len, narrow.splitlines()[1:-2])) <= 20
    assert narrow.count("W1") == wide.count("W1") == 2


def test_runs_of_numbers_are_folded() -> None:
    assert numbers([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert numbers([]) == "-"
