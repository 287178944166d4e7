"""Model code that asks for the name of its attention implementation gets the user's answer."""

import copy
import pickle

import pytest
import torch
import transformers as hf

from mllm_compile.compiler.errors import CaptureError
from mllm_compile.passes.capture.attention import attention_interfaces
from mllm_compile.passes.capture.capture import capture
from mllm_compile.passes.capture.implementation_name import ImplementationName
from mllm_compile.passes.capture.lift import lifted
from tests.families import FAMILIES
from tests.registry import text_config


def falcon(**changes):
    """Attention of its own, which calls torch's where the name is "sdpa" and else adds the mask."""
    return hf.FalconForCausalLM(hf.FalconConfig(**text_config(**changes)))


def sparse(**changes):
    """Narrows the mask to the keys that an indexer picks, for the names "sdpa" and "eager" only."""
    mixture = {"first_k_dense_replace": 2, "n_group": 1, "topk_group": 1}
    heads = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    index = {"index_topk": 3, "index_head_dim": 16, "index_n_heads": 2, "v_head_dim": 16}
    text = text_config(num_key_value_heads=4, **mixture, **heads, **index, **changes)
    return hf.DeepseekV32ForCausalLM(hf.DeepseekV32Config(**text))


def padded():
    """Two rows, one of them padded on the right."""
    ids = torch.randint(20, 128, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}


@pytest.mark.parametrize(("build", "name"), [(falcon, "sdpa"), (sparse, "sdpa"), (sparse, "eager")])
def test_code_that_asks_for_the_name_takes_the_users_branch(build, name):
    torch.manual_seed(0)
    model, batch = build(attn_implementation=name).double().train(), padded()
    with lifted(torch.float64):
        want = model(**batch).loss
        with attention_interfaces(model) as sites:
            got = model(**batch).loss
    assert sites.lines
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    assert type(model.config._attn_implementation) is str


def test_a_copied_name_still_stands_for_the_users():
    """Configurations are copied, when a call is tried to be lifted out of the graph."""
    name = ImplementationName("mllm_flash_0", "sdpa")
    for copied in (copy.deepcopy(name), pickle.loads(pickle.dumps(name))):
        assert copied == "sdpa"
        assert copied == "mllm_flash_0"
        assert copied != "eager"


def test_a_mask_that_is_added_to_scores_is_refused():
    """The mask says true and false; code that adds it to scores expects zeros and large numbers."""
    with pytest.raises(CaptureError, match=r"modeling_falcon.*attn_implementation"):
        capture(falcon(attn_implementation="eager"), padded())


def test_masks_of_other_models_are_not_added():
    workload = FAMILIES["llava"]()
    assert capture(workload.model, workload.collate(workload.samples[:2])).report.attention
