"""The drawn masks of the benchmarks are those that published tables are made from."""

import numpy as np
import pytest

from benchmarks.masks import NAMES, TEXT, draw, masks, touched_blocks


@pytest.mark.parametrize(("tokens", "blocks"), [(4096, 290), (8192, 888), (16384, 2257)])
def test_packed_multimodal_masks_touch_the_blocks_of_the_reference(tokens, blocks):
    (_, rows), = masks("packed_mm", draw("packed_mm", tokens))  # fmt: skip
    assert touched_blocks(rows) == blocks


@pytest.mark.parametrize("name", NAMES)
def test_segments_cover_the_tokens_and_intervals_follow_from_the_ids(name):
    layout = draw(name, 1500, seed=3)
    ends = [segment.end for segment in layout.segments]
    assert [segment.start for segment in layout.segments] == [0, *ends[:-1]]
    assert ends[-1] == 1500
    documents, groups = layout.token_ids()
    place = np.arange(1500)
    causal = place[:, None] >= place
    same = (groups[:, None] == groups) & (groups >= 0)
    if name in ("ee", "EP", "EE", "MP"):
        seen = np.where(groups[:, None] < 0, causal, same)
    else:
        seen = causal | same
    seen &= documents[:, None] == documents
    _, rows = masks(name, layout)[0]
    assert np.array_equal((rows[:, :1] <= place) & (place < rows[:, 1:]), seen)


def test_a_text_segment_has_no_group():
    layout = draw("packed_mm", 3000)
    _, groups = layout.token_ids()
    for segment in layout.segments:
        assert (groups[segment.start] < 0) == (segment.kind == TEXT)
