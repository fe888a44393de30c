"""Choose the code for the places (indices) of a block's kept elements.

Bits per index for k random indices out of C, against the entropy:

     k of C       entropy   Rice   Elias-Fano   fixed width
     4 of 4096      10.85  11.18        11.75            12
    64 of 4096       7.36   7.52         7.98            12
    256 of 4096      5.38   5.50         6.00            12
"""

from typing import Literal

from comm_hooks.wire.places import Bitmap, EliasFano, PlacesCode
from comm_hooks.wire.rice import Rice

IndexCode = Literal["elias_fano", "rice"]
INDEX_CODES: tuple[IndexCode, ...] = ("elias_fano", "rice")


def places_code(name: IndexCode, universe: int, count: int) -> PlacesCode:
    """Return the named code for ``count`` of ``universe`` places, or a smaller one if any."""
    codes: list[PlacesCode] = [Bitmap(universe, count)]
    if count:
        codes.append(EliasFano(universe, count))
    if count and name == "rice":
        codes.append(Rice(universe, count))
    # Of many sets, since one is rounded up to bytes.
    return min(codes, key=lambda code: code.nbytes(sets=1024))
