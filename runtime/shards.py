"""One rank's part of a tensor in the form that torch.distributed.checkpoint can write and read.

A part is a product of index lists, so it consists of rectangles of the whole tensor: chunks, as the
checkpoint calls them. Replicas write equal chunks, of which the checkpoint keeps one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mllm_compile.compiler.regions import Region
from mllm_compile.runtime.pieces import blocks


class Shards(torch.Tensor):
    """The local tensor itself (same memory) with its place in the whole one.

    Follows ``torch.distributed._checkpointable._Checkpointable``.
    """

    whole: torch.Size
    chunks: dict[torch.Size, torch.Tensor]

    @staticmethod
    def of(local: torch.Tensor, region: Region, whole: Sequence[int]) -> "Shards":
        """``region`` are the indices into the whole tensor."""
        made = local.detach().as_subclass(Shards)
        made.whole = torch.Size(whole)
        made.chunks = {
            torch.Size(part.start for part in there): local.detach()[here]
            for there, here in blocks(region)
        }
        return made

    def size(self) -> torch.Size:  # type: ignore[override]
        """The size of the whole tensor, which is what the planner compares."""
        return self.whole

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """One for every chunk."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Where the chunks stand in the whole tensor."""
        return [
            ChunkStorageMetadata(offsets=offsets, sizes=chunk.shape)
            for offsets, chunk in self.chunks.items()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """The chunk at an offset, a view."""
        return self.chunks[index.offset]
