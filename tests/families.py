"""The zoo: tiny, seeded workloads of many multimodal families.

``FAMILIES[name]()`` gives a ``Workload`` of at least eight samples that differ in content, length
and where their images or clips stand; ``MODULES[name]`` names the parts of its model in dataflow
order. Random weights, no dropout.
"""

from tests import (
    families_audio,
    families_composite,
    families_grid,
    families_image,
    families_more,
    families_wide,
)
from tests.registry import FAMILIES, MODULES

__all__ = ["FAMILIES", "MODULES"]

_REGISTERED = (
    families_image,
    families_grid,
    families_audio,
    families_composite,
    families_more,
    families_wide,
)
