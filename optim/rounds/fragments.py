"""How parameters are cut into fragments that are exchanged at different steps."""

import heapq
from collections.abc import Sequence


def cut(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Deal items into ``count`` non-empty parts of nearly equal total size.

    The largest first, each to the smallest part: the parts differ by one item's size at most.

    Args:
        sizes: of the items; at least ``count`` of them.

    Returns:
        The indices in each part, ascending.
    """
    parts: list[tuple[int, int, list[int]]] = [(0, index, []) for index in range(count)]
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        total, index, members = parts[0]
        heapq.heapreplace(parts, (total + max(1, sizes[item]), index, [*members, item]))
    return [sorted(members) for _, _, members in sorted(parts, key=lambda part: part[1])]
