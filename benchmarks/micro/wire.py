"""Bits per kept element on the wire, header included.

Builds real payloads of 8 Mi random elements, and decodes them. The bound is the
entropy of a random set of places plus the bits of the values.
"""

import math
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.micro.timing import medians, print_head, times_in_turns
from comm_hooks import TopK
from comm_hooks.exchange.payload import PayloadFormat
from comm_hooks.wire.index_codes import INDEX_CODES
from comm_hooks.wire.stamp import Stamp
from comm_hooks.wire.values import VALUE_BITS

BLOCK, BLOCKS = 4096, 2048
DENSITY = 1 / 64
_ROUNDS = 7
STAMP = Stamp(configuration=0, step=0)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    head = torch.tensor(0.0)
    vector = torch.randn(1, BLOCKS * BLOCK, generator=torch.Generator().manual_seed(0))
    kept = math.ceil(DENSITY * BLOCK)
    entropy = math.log2(math.comb(BLOCK, kept)) / kept
    selection = milliseconds(lambda: vector.view(BLOCKS, BLOCK).topk(kept, dim=1))
    print(f"\n{kept} of {BLOCK}, {vector.numel():,} elements; the entropy of random places is")
    print(f"{entropy:.3f} bits. torch.topk of the blocks takes {selection:.0f} ms on one thread.\n")
    print_head(
        *("value_bits", "index_code", "bits per kept element", "over the bound"),
        *("sent of the kept", "encode, ms", "decode, ms"),
    )
    for value_bits in VALUE_BITS:
        for index_code in INDEX_CODES:
            top_k = TopK(DENSITY, BLOCK, value_bits, index_code)
            format_ = PayloadFormat([(top_k, *vector.shape)], ranks=range(2), place=0)
            (payload,) = format_.encode_all([vector[None]], [[1]], head, STAMP)
            back = torch.empty_like(vector)
            format_.decode([back], payload, [[1]], 0)
            bits = 8 * payload.nbytes / (BLOCKS * kept)
            arrived = int((back != 0).sum()) / (BLOCKS * kept)
            encode = milliseconds(partial(format_.encode_all, [vector[None]], [[1]], head, STAMP))
            decode = milliseconds(partial(format_.decode, [back], payload, [[1]], 0))
            print(
                f"| {value_bits} | {index_code} | {bits:.3f} | {bits / (entropy + value_bits):.3f} "
                f"| {100 * arrived:.2f} % | {encode:.0f} | {decode:.0f} |"
            )


def milliseconds(action: Callable[[], object]) -> float:
    """Return the median time of an action on one thread."""
    return medians(times_in_turns({"": action}, _ROUNDS, warm_up=1))[""]
