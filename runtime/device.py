"""Which device a rank computes on, and which torch.distributed backend serves it."""

import torch

from mllm_compile.compiler.errors import RequestError, explain


def device_of(local_rank: int) -> torch.device:
    """The GPU of this rank on its machine, or the CPU (one thread) where there is no GPU."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise RequestError(
            explain(
                f"local rank {local_rank}",
                expected="a GPU of its own",
                got=f"{torch.cuda.device_count()} on this machine",
                remedy="use fewer ranks, or hide the GPUs with CUDA_VISIBLE_DEVICES=''",
            )
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def backend_of(device: torch.device) -> str:
    """NCCL for tensors on a GPU; gloo for those on the host, which checkpoints always use."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
