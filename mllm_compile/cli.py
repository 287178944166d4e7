"""The command line: arguments and errors. What commands do stands in ``commands_*``.

Exit codes: 0 done; 1 verified and found different, or a kernel is not fit for its table; 2 an
error, told in one paragraph on standard error (``--debug`` shows the traceback); 130 interrupted.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from mllm_compile.compiler.errors import CompileError
from mllm_compile.output import check_writable

_KERNELS = "compile the Triton kernels ahead of time, and show what they take"
ERROR = 2
INTERRUPTED = 130
OUTPUTS = {"output": False, "json": False, "log": False, "dump": True, "checkpoint": True}  # folder


class Parser(argparse.ArgumentParser):
    """Argument errors, too, are one paragraph and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is."""
        self.exit(ERROR, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        _check_outputs(options)
        if options.path:  # a workload may lie beside its request
            sys.path.append(str(Path(options.path).resolve().parent))
        code = _command(options.command)(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        print(f"mllm-compile {options.command}: {_paragraph(error)}", file=sys.stderr)
        return ERROR


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    """The command's function; what it needs is imported only now, for quick help and errors."""
    if name in ("verify", "run"):
        from mllm_compile import commands_run

        return {"verify": commands_run.verify, "run": commands_run.run}[name]
    if name == "kernels":
        from mllm_compile import commands_kernels

        return commands_kernels.kernels
    from mllm_compile import commands_plan as plan

    return {"capture": plan.capture, "plan": plan.plan, "inspect": plan.inspect}[name]


def _check_outputs(options: argparse.Namespace) -> None:
    """What would be written at the end must be writable at the start."""
    for option, folder in OUTPUTS.items():
        path = getattr(options, option, None)
        if path:
            folder = folder or (options.command, option) == ("kernels", "output")
            check_writable(f"--{option}", Path(path), folder=folder)


def _paragraph(error: Exception) -> str:
    """The message in one paragraph; an error that is not ours is named and traceable."""
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    parts = [str(error), *notes]
    text = " ".join(" ".join(parts).split())
    if isinstance(error, CompileError):
        return text
    return f"{type(error).__name__}: {text or 'no message'}; --debug shows where"


def _parser() -> Parser:
    parser = Parser(prog="mllm-compile", description="Compile and train multimodal LLMs.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text, add in (
        ("capture", "one graph of the model's forward, and how it was made", None),
        ("plan", "decide everything, and show it as tables", _plan_options),
        ("verify", "compare loss and every gradient with the plain model's", _verify_options),
        ("run", "train", _run_options),
        ("inspect", "look at a plan: graph, ranks, single nodes, differences", _inspect_options),
    ):
        command = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        what = "REQUEST" if name != "inspect" else "PLAN-or-REQUEST"
        kind = "a TOML request" if name != "inspect" else "a plan file, or a TOML request"
        command.add_argument("path", metavar=what, help=kind)
        _common_options(command)
        if name in ("capture", "plan", "inspect"):
            command.add_argument(
                "--meta", action="store_true", help="keep parameters without storage"
            )
        if add is not None:
            add(command)
    command = commands.add_parser("kernels", help=_KERNELS, description=f"{_KERNELS}.")
    _common_options(command)
    _kernels_options(command)
    return parser


def _common_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="change a key of the request, like microbatches=8 or module.1.pipeline=4",
    )
    command.add_argument("--debug", action="store_true", help="show tracebacks of errors")


def _kernels_options(command: argparse.ArgumentParser) -> None:
    what = "compile for its attention sites alone; else the whole table"
    targets = ("sm80", "sm90", "sm100", "gfx942")
    command.add_argument("path", metavar="PLAN-or-REQUEST", nargs="?", help=what)
    command.add_argument("--target", nargs="+", choices=targets, help="architectures (all)")
    command.add_argument("--json", metavar="OUT", help="write what the kernels take to a file")
    command.add_argument("--output", metavar="DIR", help="write source, PTX and code there")


def _plan_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("-o", "--output", metavar="PLAN.json", help="write the plan to a file")
    command.add_argument("--stop-after", metavar="PASS", help="stop after this pass")
    command.add_argument("--dump", metavar="DIR", help="write the plan after every pass")


def _verify_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--in-process", action="store_true", help="one thread a rank, no launch")
    command.add_argument("--json", metavar="OUT", help="write the report to a file")


def _run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--steps", type=int, metavar="N", default=10, help="optimizer steps (10)")
    command.add_argument("--checkpoint", metavar="DIR", default="", help="save there at the end")
    command.add_argument(
        "--save-every", type=int, metavar="N", default=0, help="and after every N steps"
    )
    command.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    command.add_argument("--log", metavar="OUT.jsonl", help="write loss and speed of every step")


def _inspect_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--graph", metavar="MODULE", help="list the nodes of a module; '' is all")
    command.add_argument("--rank", type=int, metavar="R", help="all that one rank does")
    command.add_argument("--explain", metavar="NODE", help="where, why and how dear one node is")
    command.add_argument(
        "--diff", nargs=2, metavar="PASS", help="what changed in the plan between two passes"
    )


def _version() -> str:
    try:
        return version("mllm-compile")
    except PackageNotFoundError:
        return "(not installed)"
