"""The samples of each step, and a planted one."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.audit.script.planting import Plant, plant
from comm_hooks.optim.private.data.poisson import PoissonLoader, PoissonSampler
from comm_hooks.optim.private.data.tickets import Ticket, Tickets


class Draws:
    """Follows batches from the sampler to the step, and plants a sample on their way.

    Args:
        planted: the sample; None for none.

    Attributes:
        observers: by event; see :mod:`benchmarks.audit.events`.
    """

    def __init__(self, planted: Plant | None) -> None:
        self._planted = planted
        # By the id of a data set, which is kept alive.
        self._edits: dict[int, tuple[Any, Callable[[int, Any], Any]]] = {}
        # By the sampler and the tickets of a loader: its rank, the number of ranks, and the
        # samples of its pending batches, as indices of the whole data set.
        self._waiting: dict[object, tuple[int, int, deque[list[int]]]] = {}
        self._drawn_for: dict[Ticket, list[int]] = {}
        self._drawn: list[int] | None = None
        self.observers: dict[str, Callable[..., Any]] = {
            "loader": self._make_loader,
            "draw": self._draw,
            "iteration": self._start_iteration,
            "batch": self._issue,
            "step": self._spend,
        }

    def take(self) -> list[int] | None:
        """Return the samples of the current step; None if they are not known."""
        drawn, self._drawn = self._drawn, None
        return drawn

    def _make_loader(
        self,
        method: Callable[..., None],
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
        method(loader, dataset, *args, rank=rank, world_size=world_size, **options)
        waiting: tuple[int, int, deque[list[int]]] = (rank, world_size, deque())
        self._waiting[loader.batch_sampler] = self._waiting[loader.tickets] = waiting

    def _draw(
        self, method: Callable[..., Iterator[list[int]]], sampler: PoissonSampler
    ) -> Iterator[list[int]]:
        if sampler not in self._waiting:
            yield from method(sampler)
            return
        rank, world_size, waiting = self._waiting[sampler]
        planted = self._planted
        absent = planted.index if planted is not None and planted.kind == "absent" else None
        for indices in method(sampler):
            drawn = [rank + i * world_size for i in indices]
            waiting.append(drawn)
            yield [i for i, index in zip(indices, drawn, strict=True) if index != absent]

    def _start_iteration(self, method: Callable[..., None], tickets: Tickets) -> None:
        method(tickets)
        if tickets in self._waiting:
            self._waiting[tickets][2].clear()

    def _issue(self, method: Callable[..., Ticket], tickets: Tickets, batch: Any) -> Ticket:
        ticket = method(tickets, batch)
        if tickets in self._waiting:
            self._drawn_for[ticket] = self._waiting[tickets][2].popleft()
        return ticket

    def _spend(self, method: Callable[..., None], tickets: Tickets, ticket: Ticket) -> None:
        self._drawn = self._drawn_for.get(ticket)
        method(tickets, ticket)


class _Edited:
    """A data set with one changed sample."""

    def __init__(self, dataset: Any, edit: Callable[[int, Any], Any]) -> None:
        self._dataset, self._edit = dataset, edit

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._edit(index, self._dataset[index])
