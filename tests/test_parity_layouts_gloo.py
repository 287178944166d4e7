"""Any layouts, on any ranks, as processes over gloo: the plain model's loss and gradients."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from mllm_compile.compiler.request import Request
from mllm_compile.verify import verify
from tests.families import MODULES
from tests.layout_requests import PLACEMENTS, random_request
from tests.parity import assert_passed
from tests.test_parity_layouts import ALL, NAMES

FEW = 4


def _request(name: str, placement: str, few: bool) -> Request:
    """The first random request, of those that no other test has, for up to 4 or for more ranks."""
    first = ALL * (1 + NAMES.index(name))  # families of as many modules get other requests
    drawn = (random_request(seed, MODULES[name], placement) for seed in count(first))
    request = next(each for each in drawn if (1 < each.num_ranks <= FEW) == few)
    return replace(request, workload=f"tests.gloo_workloads:ragged_{name}")


def _cases() -> Iterator[tuple[str, str, bool]]:
    for place, name in enumerate(NAMES):
        yield from ((name, placement, True) for placement in PLACEMENTS)
        yield name, PLACEMENTS[place % len(PLACEMENTS)], False


@pytest.mark.slow
@pytest.mark.parametrize(("name", "placement", "few"), _cases())
def test_random_layouts_over_gloo(name: str, placement: str, few: bool) -> None:
    assert_passed(verify(_request(name, placement, few)))
