"""The commands that compute: verify and run. Each returns the exit code."""

import json
from argparse import Namespace
from pathlib import Path
from statistics import median

from mllm_compile import verify as verification
from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.compiler.request import Request
from mllm_compile.output import Output, write
from mllm_compile.progress import Run, tokens_per_second
from mllm_compile.render_verify import verification_view
from mllm_compile.runtime.launch import launch
from mllm_compile.train import Training

DIFFERENT = 1


def verify(options: Namespace) -> int:
    """The program against the plain model; exit 0 only if loss and every gradient agree."""
    request = Request.load(options.path, options.overrides)
    found = verification.verify(request, in_process=options.in_process)
    if options.json:
        write(Path(options.json), json.dumps(found.as_dict(), indent=2) + "\n")
    Output().print(verification_view(found))
    return 0 if found.passed else DIFFERENT


def run(options: Namespace) -> int:
    """Train: start the ranks here, or be one of them under torchrun."""
    request = Request.load(options.path, options.overrides)
    if options.resume and not options.checkpoint:
        raise RequestError(explain("--resume", expected="--checkpoint DIR, to resume from"))
    if options.save_every < 0:
        got = str(options.save_every)
        raise RequestError(explain("--save-every", expected="at least 0", got=got))
    if options.save_every and not options.checkpoint:
        raise RequestError(explain("--save-every", expected="--checkpoint DIR, to save there"))
    if options.steps < 1:
        raise RequestError(explain("--steps", expected="at least 1", got=str(options.steps)))
    training = Training(
        request,
        options.steps,
        checkpoint=options.checkpoint,
        save_every=options.save_every,
        resume=options.resume,
    )
    order = Run(training, Path(options.log) if options.log else None)
    results = launch("mllm_compile.progress:rank_main", order, request.num_ranks)
    steps = results.get(0, [])
    if steps:
        speed = median(map(tokens_per_second, steps))  # the first step compiles
        losses = f"loss {steps[0].loss:.4f} -> {steps[-1].loss:.4f}"
        Output().print(f"trained {len(steps)} steps: {losses}, {speed:.0f} tokens/s")
    elif 0 in results:
        Output().print(f"nothing to do: the checkpoint has done {options.steps} steps or more")
    return 0
