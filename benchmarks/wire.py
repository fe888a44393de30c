"""Bits per kept element on the wire, with all that goes with it, as a Markdown table.

    python benchmarks/wire.py

Builds real payloads, header included, of 8 Mi random elements, and decodes them. The bound is what
telling a random set of places takes, plus the bits of the values.
"""

import math

import torch
import typer
from torch.utils.benchmark import Timer

from comm_hooks import TopK
from comm_hooks.exchange.payload import PayloadFormat
from comm_hooks.wire.index_codes import INDEX_CODES
from comm_hooks.wire.stamp import Stamp
from comm_hooks.wire.values import VALUE_BITS

BLOCK, BLOCKS = 4096, 2048
STAMP = Stamp(configuration=0, step=0)


def main(density: float = 1 / 64) -> None:
    """Print the table for a density."""
    torch.set_num_threads(1)
    vector = torch.randn(1, BLOCKS * BLOCK, generator=torch.Generator().manual_seed(0))
    kept = math.ceil(density * BLOCK)
    entropy = math.log2(math.comb(BLOCK, kept)) / kept
    selection = milliseconds("b.topk(k, dim=1)", b=vector.view(BLOCKS, BLOCK), k=kept)
    print(f"\n{kept} of {BLOCK}, {vector.numel():,} elements; the entropy of random places is")
    print(f"{entropy:.3f} bits. torch.topk of the blocks takes {selection:.0f} ms on one thread.\n")
    print(
        "| value_bits | index_code | bits per kept element | over the bound | sent of the kept "
        "| encode, ms | decode, ms |"
    )
    print("|---|---|---|---|---|---|---|")
    for value_bits in VALUE_BITS:
        for index_code in INDEX_CODES:
            top_k = TopK(density, BLOCK, value_bits, index_code)
            format_ = PayloadFormat([(top_k, *vector.shape)], ranks=range(2), place=0)
            (payload,) = format_.encode_all([vector[None]], [[1]], torch.tensor(0.0), STAMP)
            back = torch.empty_like(vector)
            format_.decode([back], payload, [[1]], 0)
            bits = 8 * payload.nbytes / (BLOCKS * kept)
            arrived = int((back != 0).sum()) / (BLOCKS * kept)
            names = {"f": format_, "v": [vector[None]], "p": payload, "b": [back], "k": [[1]]}
            names |= {"h": torch.tensor(0.0), "s": STAMP}
            encode = "f.encode_all(v, k, h, s)"
            print(
                f"| {value_bits} | {index_code} | {bits:.3f} | {bits / (entropy + value_bits):.3f} "
                f"| {100 * arrived:.2f} % | {milliseconds(encode, **names):.0f} "
                f"| {milliseconds('f.decode(b, p, k, 0)', **names):.0f} |"
            )


def milliseconds(statement: str, **names: object) -> float:
    """Return the median time of a statement on one thread."""
    timer = Timer(statement, globals=names, num_threads=1)
    return timer.blocked_autorange(min_run_time=0.5).median * 1e3


if __name__ == "__main__":
    typer.run(main)
