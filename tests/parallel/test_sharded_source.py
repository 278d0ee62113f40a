"""What a rank reads of a checkpoint: its rows and columns, and of what is encoded its blocks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from random_blocks import blocks_of

from engine.cpu_kernels.block_packing import LAYOUTS
from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.quantize import pack_blocks, unpack
from engine.models.sharding import Span
from engine.models.taken import Taken
from engine.weights.sharded_source import ShardedSource
from engine.weights.source import EncodedRows


class OneMatrix:
    def __init__(self, values: torch.Tensor, found: EncodedRows | None = None) -> None:
        self.values, self.found = values, found

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"w": tuple(self.values.shape)}

    def file_of(self, name: str) -> str:
        return "a file"

    def read_into(self, name: str, destination: torch.Tensor, expert: int | None = None) -> None:
        destination.copy_(self.values if expert is None else self.values[expert])

    def mapped(self, name: str, expert: int | None = None) -> torch.Tensor | None:
        return None

    def encoded(self, name: str, expert: int | None = None) -> EncodedRows | None:
        return self.found

    def __enter__(self) -> OneMatrix:
        return self

    def __exit__(self, *error: object) -> None: ...


def values_of(found: EncodedRows, n: int, k: int) -> torch.Tensor:
    return unpack(pack_blocks(found.rows.contiguous(), found.format), n, k, found.format)


@pytest.mark.parametrize("format", sorted(LAYOUTS, key=int), ids=lambda format: format.name)
def test_blocks_of_a_part_stand_for_the_values_of_the_part(format: Format) -> None:
    n, k = 96, 1024
    found = EncodedRows(format, blocks_of(format, n, k))
    whole = values_of(found, n, k)
    columns, rows = Span(256, 512), (Span(8, 16), Span(64, 32))
    source = OneMatrix(whole, found)
    by_columns = ShardedSource(source, {"w": (Taken(columns=columns), 0)}).encoded("w")
    assert by_columns is not None
    assert torch.equal(values_of(by_columns, n, 512), whole[:, 256:768])
    by_rows = ShardedSource(source, {"w": (Taken(rows), 0)}).encoded("w")
    assert by_rows is not None
    assert torch.equal(values_of(by_rows, 48, k), torch.cat((whole[8:24], whole[64:96])))


def test_columns_that_cut_a_block_are_decoded() -> None:
    found = EncodedRows(Format.Q4_K, blocks_of(Format.Q4_K, 8, 512))
    source = ShardedSource(OneMatrix(values_of(found, 8, 512), found), {"w": (Taken(columns=Span(128, 256)), 0)})
    assert source.encoded("w") is None
    reordered = EncodedRows(Format.INT4_GROUP, blocks_of(Format.INT4_GROUP, 8, 64), torch.arange(64).int())
    source = ShardedSource(OneMatrix(torch.zeros(8, 64), reordered), {"w": (Taken(columns=Span(32, 32)), 0)})
    assert source.encoded("w") is None


def test_stacked_experts_are_cut_along_their_own_rows() -> None:
    whole = torch.arange(3 * 8 * 6, dtype=torch.float32).view(3, 8, 6)
    source = ShardedSource(OneMatrix(whole), {"w": (Taken((Span(0, 2), Span(4, 2))), 1)})
    assert source.shapes() == {"w": (3, 4, 6)}
    expected = torch.cat((whole[:, 0:2], whole[:, 4:6]), dim=1)
    stacked, one = torch.empty(3, 4, 6), torch.empty(4, 6)
    source.read_into("w", stacked)
    assert torch.equal(stacked, expected)
    source.read_into("w", one, expert=2)
    assert torch.equal(one, expected[2])
