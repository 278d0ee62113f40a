"""What graphs will take of a device, said before they are captured: a line of the memory ledger."""

from __future__ import annotations

GRAPH_BYTES = 64 << 10
"""device memory of one instantiated graph of a few kernels, outside of the pool. An assumption, not a documented
figure: to be checked on a GPU, where `GraphSet.memory_bytes` sees it (its growth from one size to the next, divided by
the size's graphs)"""
FIXED_BYTES = 64 << 20
"""another: the capture stream's cuBLAS workspace (32 MiB on Hopper), and the unused ends of the allocator's segments,
which are of 2 and 20 MiB"""


def estimate_graph_bytes(activation_bytes: int, num_pieces: int, piecewise_sizes: int, full_sizes: int) -> int:
    """Upper estimate in bytes.

    activation_bytes: peak of the compiled program (without logits) at the largest captured size. It is counted twice:
    the pool of all graphs, which holds one size's activations because everything in it is reused, and what warm-ups
    leave in the allocator's cache of the capture stream. num_pieces: pieces of the program (layers + 1 where each layer
    has one attention). piecewise_sizes, full_sizes: numbers of sizes. A full graph, which has the nodes of all pieces
    and of the calls between them, is counted as so many graphs.
    """
    if piecewise_sizes + full_sizes == 0:
        return 0
    num_graphs = piecewise_sizes * num_pieces + full_sizes * (2 * num_pieces - 1)
    return 2 * activation_bytes + FIXED_BYTES + num_graphs * GRAPH_BYTES
