"""Every rank compiles for itself: before the first step they compare what they arrived at."""

from collections.abc import Sequence
from hashlib import sha256

import torch

from mllm_compile.compiler.errors import RunError, explain
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.plan_json import to_json
from mllm_compile.runtime.transport import Transport


def agree(transport: Transport, plans: Sequence[Plan]) -> None:
    """Raise RunError on every rank unless all have equal plans of equal graphs.

    They differ if the workload is not deterministic, or if the machines hold other versions of the
    model's code: transfers would then meet in the wrong shapes, or never.
    """
    digest = sha256("".join(map(to_json, plans)).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(transport.device)
    found = [bytes(part.cpu().tolist()) for part in transport.all_gather(mine)]
    others = [rank for rank, other in enumerate(found) if other != found[0]]
    if others:
        raise RunError(
            explain(
                f"ranks {', '.join(map(str, others))}",
                expected="the plan of rank 0",
                got="another one",
                remedy="make the workload deterministic, with the same samples and the same "
                "versions of torch and of the model's code on every rank; under torchrun set "
                "PYTHONHASHSEED=0, in case the model iterates over a set",
            )
        )
