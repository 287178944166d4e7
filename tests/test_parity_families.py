"""Every family, as a pipeline of several ranks, gives the plain model's loss and gradients.

Samples differ in length: the two microbatches are of different programs.
"""

import pytest

from tests.families import FAMILIES
from tests.parity import assert_passed, verified, workload_of


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_program_equals_plain_model(name):
    assert_passed(verified(name, workload=workload_of(name), microbatches=2))
