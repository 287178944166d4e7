"""Short requests for tests."""

from mllm_compile.compiler.request import ModuleSpec, Parallel, Request


def request(*modules, microbatches=4):
    """Modules as (path or paths, pipeline), on consecutive ranks."""
    specs, first = [], 0
    for paths, pipeline in modules:
        ranks = tuple(range(first, first + pipeline))
        first += pipeline
        paths = (paths,) if isinstance(paths, str) else paths
        specs.append(ModuleSpec(paths, ranks, Parallel(pipeline=pipeline)))
    return Request(tuple(specs), microbatches=microbatches)
