"""The outcome of a verification for people."""

from rich.console import Group, RenderableType
from rich.text import Text

from mllm_compile.quantities import size
from mllm_compile.render import new_table
from mllm_compile.verify import Verification

WORST = 5


def verification_view(found: Verification) -> Group:
    """Verdict, loss, the worst gradients, what is missing or too many, what was sent."""
    verdict = "agrees with" if found.passed else "DIFFERS from"
    head = Text(
        f"the program {verdict} the plain model", "bold green" if found.passed else "bold red"
    )
    table = new_table("", "compared", "error")
    table.add_row(
        f"loss: plain {found.eager_loss:.12g}, program {found.program_loss:.12g}",
        f"{found.loss_error:.1e}",
    )
    table.add_row(f"gradients: {len(found.errors)}, tolerance {found.tolerance:.0e}; worst:", "")
    for name, error in sorted(found.errors.items(), key=lambda item: -item[1])[:WORST]:
        table.add_row(f"  {name}", f"{error:.1e}")
    table.add_row("norm of all gradients", f"{found.norm_error:.1e}")
    for title, names in (("missing", found.missing), ("unexpected", found.unexpected)):
        for name in names:
            table.add_row(f"{title}: {name}", "-")
    parts: list[RenderableType] = [head, table, Text(_traffic(found))]
    return Group(*parts)


def _traffic(found: Verification) -> str:
    report = found.as_dict()
    messages, sizes = report["messages"], report["bytes"]
    sent = ", ".join(
        f"{messages[way]} messages {way} ({size(sizes[way])})" for way in ("forward", "backward")
    )
    peaks = ", ".join(size(peak or 0) for peak in report["peak_live_bytes_per_rank"])
    return (
        f"sent: {sent}\nhost reads: {report['host_reads']}\npeak of live values per rank: {peaks}"
    )
