"""How far this process has come among the ranks of a group."""

from collections import Counter
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist


@dataclass
class Progress:
    """Counts what the ranks of a group do together: all exchanges of this process.

    Ranks that catch an error and go on must not take the failure that is over for one that is yet
    to come: what they tell each other carries the number of the round that it is about.

    Attributes:
        generation: how many groups of the same name this process has had before: a store outlives
            them, and what they have said.
        begun: rounds that have begun, the present one included.
        forgiven: the last round that had failed here when the present round or comparison began.
        notices: comparisons within the present round.
    """

    generation: int = 0
    begun: int = 0
    forgiven: int = -1
    notices: int = 0
    _failed: int = -1

    def begin(self) -> int:
        """Begin a round; return its number."""
        self.begun += 1
        self.notices = 0
        self.forgiven = self._failed
        return self.begun

    def compare(self) -> str:
        """Begin a comparison; return its name, which is the same on all ranks."""
        self.notices += 1
        self.forgiven = self._failed
        return f"{self.begun}.{self.notices}"

    def fail(self, number: int) -> None:
        """Note that a round has failed here."""
        self._failed = max(self._failed, number)


_generations: Counter[str] = Counter()
_of_group: WeakKeyDictionary[dist.ProcessGroup, Progress] = WeakKeyDictionary()


def progress_of(group: dist.ProcessGroup) -> Progress:
    """Return the progress of this process in a group: one object for all its transports."""
    if group not in _of_group:
        name = group.group_name
        _of_group[group] = Progress(_generations[name])
        _generations[name] += 1
    return _of_group[group]
