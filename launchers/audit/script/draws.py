"""Who is drawn for each step, and a sample that is in the data set or is not."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from comm_hooks.launchers.audit.script.patching import around
from comm_hooks.launchers.audit.script.planting import Plant, plant
from comm_hooks.optim.private.data.poisson import PoissonLoader, PoissonSampler
from comm_hooks.optim.private.data.tickets import Claim, Tickets


class Draws:
    """Follows batches from the sampler to the step, and plants a sample on their way.

    Args:
        planted: the sample; None: none.
    """

    def __init__(self, planted: Plant | None) -> None:
        self._planted = planted
        # By data set, which is kept alive.
        self._edits: dict[int, tuple[Any, Callable[[int, Any], Any]]] = {}
        self._ticket: Any = None

    def patches(self) -> list[Any]:
        """Return what is to be patched."""
        return [
            around(PoissonLoader, "__init__", self._make_loader),
            around(PoissonSampler, "__iter__", self._sample),
            around(Tickets, "start", self._start_iteration),
            around(Tickets, "issue", self._issue),
            around(Claim, "spend", self._spend),
        ]

    def take(self) -> list[int] | None:
        """Return who was drawn for the step that is being taken; None if that is not known."""
        ticket, self._ticket = self._ticket, None
        return getattr(ticket, "drawn", None)

    def _make_loader(
        self,
        original: Callable[..., None],
        loader: PoissonLoader,
        dataset: Any,
        *args: Any,
        rank: int = 0,
        world_size: int = 1,
        **options: Any,
    ) -> None:
        if self._planted is not None and self._planted.index < len(dataset):
            if id(dataset) not in self._edits:
                self._edits[id(dataset)] = dataset, plant(dataset, self._planted)
            dataset = _Edited(dataset, self._edits[id(dataset)][1])
        original(loader, dataset, *args, rank=rank, world_size=world_size, **options)
        sampler: Any = loader.batch_sampler
        tickets: Any = loader.tickets
        sampler.drawn_by = tickets.drawn_by = _Waiting(rank, world_size)

    def _sample(
        self, original: Callable[..., Iterator[list[int]]], sampler: Any
    ) -> Iterator[list[int]]:
        waiting: _Waiting | None = getattr(sampler, "drawn_by", None)
        absent = None
        if self._planted is not None and self._planted.kind == "absent":
            absent = self._planted.index
        for indices in original(sampler):
            if waiting is None:
                yield indices
                continue
            drawn = [waiting.rank + i * waiting.world_size for i in indices]
            waiting.batches.append(drawn)
            yield [i for i, index in zip(indices, drawn, strict=True) if index != absent]

    def _start_iteration(self, original: Callable[..., None], tickets: Any) -> None:
        original(tickets)
        if hasattr(tickets, "drawn_by"):
            tickets.drawn_by.batches.clear()

    def _issue(self, original: Callable[..., None], tickets: Any, batch: Any) -> None:
        original(tickets, batch)
        if hasattr(tickets, "drawn_by"):
            tickets._waiting[-1].drawn = tickets.drawn_by.batches.popleft()

    def _spend(self, original: Callable[..., None], claim: Any, samples: int) -> None:
        self._ticket = claim._ticket
        original(claim, samples)


class _Waiting:
    """What a sampler has drawn, by indices of the whole data set, and the loader not yet passed."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.batches: deque[list[int]] = deque()


class _Edited:
    """A data set with one sample changed on its way."""

    def __init__(self, dataset: Any, edit: Callable[[int, Any], Any]) -> None:
        self._dataset, self._edit = dataset, edit

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._edit(index, self._dataset[index])
