"""The fragments of a model and the local steps after which each of them is exchanged."""

import heapq
from collections.abc import Iterable, Sequence


class FragmentClock:
    """A counter of local steps that selects the fragment of a model to exchange after each step.

    The parameters are divided into F fragments of nearly equal size.  Fragment f is exchanged after
    the steps t with t mod K = floor(f K / F), so every K steps.

    Args:
        sizes: the number of elements of each parameter.
        fragments: F, the number of fragments.
        local_steps: K, at least F; None with clients: then :meth:`tick` returns no fragment.

    Attributes:
        steps: the number of local steps so far.
        fragments: the indices of the parameters of each fragment.
        exchanged_at: for each fragment, the number of local steps at its last exchange.
    """

    def __init__(self, sizes: Sequence[int], fragments: int, local_steps: int | None) -> None:
        self.fragments = cut(sizes, fragments)
        self._local_steps = local_steps
        self.steps = 0
        self.exchanged_at = [0] * fragments

    def tick(self) -> list[int]:
        """Count a local step; return the list of fragments (0 or 1) to exchange after it."""
        self.steps += 1
        period, count = self._local_steps, len(self.fragments)
        if period is None:
            return []
        return [f for f in range(count) if self.steps % period == f * period // count]

    @property
    def outstanding(self) -> list[int]:
        """The fragments with local steps since their last exchange."""
        return [f for f, step in enumerate(self.exchanged_at) if step != self.steps]

    def places(self, fragments: Iterable[int]) -> list[int]:
        """Return the indices of the parameters in these fragments, ascending."""
        return sorted(place for f in fragments for place in self.fragments[f])

    def note_exchange(self, fragments: Iterable[int]) -> None:
        """Record that these fragments were exchanged after the last local step."""
        for f in fragments:
            self.exchanged_at[f] = self.steps

    def load(
        self, steps: int, exchanged_at: Sequence[int], fragments: Sequence[Sequence[int]]
    ) -> bool:
        """Continue from a saved clock; return whether it had as many fragments as this one.

        With another number of fragments, all of them count as exchanged after the last step.
        """
        self.steps = steps
        if len(fragments) != len(self.fragments):
            self.exchanged_at = [steps] * len(self.fragments)
            return False
        self.fragments = [sorted(places) for places in fragments]
        self.exchanged_at = list(exchanged_at)
        return True


def cut(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide items into ``count`` non-empty parts of nearly equal total size.

    The largest items first, each into the smallest part: parts differ by at most one item's size.

    Args:
        sizes: the sizes of the items; at least ``count`` items.

    Returns:
        The indices in each part, ascending.
    """
    parts: list[tuple[int, int, list[int]]] = [(0, index, []) for index in range(count)]
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        total, index, members = parts[0]
        heapq.heapreplace(parts, (total + max(1, sizes[item]), index, [*members, item]))
    return [sorted(members) for _, _, members in sorted(parts, key=lambda part: part[1])]
