"""Buckets: sets of tensors that are exchanged together, with their workspaces."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import torch

from comm_hooks.exchange.layout import Layout, Segment
from comm_hooks.exchange.routes.route import Route
from comm_hooks.exchange.settings import ExchangeSettings
from comm_hooks.requirements import require_dense_floats


class Bucket:
    """Tensors that are exchanged together: workspace, routes, and whether ranks have compared them.

    Attributes:
        layout: the float32 workspace, with a view for each tensor.
        routes: the routes used so far, by compressor and :attr:`NoiseHook.place`.
        digest: 32 bits of the settings and tensors, equal on all ranks; None until it is needed.
        compared_in: the epoch in which ranks last compared the names and shapes of the tensors.
        mean: a layout of its own for means, see :meth:`Buckets.mean_of`; None until it is needed.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.mean: Layout | None = None
        self.routes: dict[Hashable, Route] = {}
        self.digest: int | None = None
        self.compared_in: int | None = None


class Buckets:
    """The buckets of an exchange, each made at its first use.

    A new bucket replaces those that share a parameter with it: DDP rebuilds its buckets.

    Args:
        settings: the settings of the exchange.
        numels: a dictionary that receives the number of elements of each compressed parameter.
    """

    def __init__(self, settings: ExchangeSettings, numels: dict[str, int]) -> None:
        self._settings = settings
        self._numels = numels
        self._found: dict[Hashable, Bucket] = {}
        self._storage: dict[torch.device, torch.Tensor] = {}

    def __iter__(self) -> Iterator[Bucket]:
        return iter(dict.fromkeys(self._found.values()))

    def __len__(self) -> int:
        return len(set(self._found.values()))

    def of(
        self, tensors: Mapping[str, torch.Tensor], extras: Mapping[str, torch.Tensor] | None = None
    ) -> Bucket:
        """Return the bucket of named tensors to average; make it at the first call.

        Args:
            tensors, extras: see :meth:`~comm_hooks.Exchange.average_`.

        Raises:
            ValueError: if there are no tensors, or one of them is not dense and floating-point.
        """
        if not tensors:
            raise ValueError("Exchange: there is nothing to average: pass at least one tensor")
        for tensor in tensors.values():
            require_dense_floats(tensor)
        exempts = self._settings.exempts
        segments = [Segment(n, tuple(t.shape), exempts(t.shape)) for n, t in tensors.items()]
        segments += [Segment(n, tuple(t.shape), True, True) for n, t in (extras or {}).items()]
        return self.of_segments(segments, next(iter(tensors.values())).device)

    def of_parameters(
        self,
        parameters: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        name_of: Callable[[torch.Tensor], str],
    ) -> Bucket:
        """Return the bucket of these parameters' gradients.

        Args:
            parameters: their shapes decide which are exempt; they must outlive the exchange.
            tensors: the gradients, in the shapes of the first call with these parameters.
            name_of: returns a parameter's name.
        """
        key = (tuple(map(id, parameters)), tensors[0].device)
        if key not in self._found:
            exempts = self._settings.exempts
            pairs = zip(parameters, tensors, strict=True)
            segments = [Segment(name_of(p), tuple(t.shape), exempts(p.shape)) for p, t in pairs]
            bucket = self.of_segments(segments, tensors[0].device)
            self._found[key] = bucket
        return self._found[key]

    def of_segments(self, segments: Sequence[Segment], device: torch.device) -> Bucket:
        """Return the bucket of these segments on a device; make it at the first call.

        Raises:
            ValueError: if two segments have the same name.
        """
        key = (tuple(segments), device)
        if key not in self._found:
            layout = Layout(key[0], device, self._settings.granularity)
            if len(layout.names) < len(segments):
                raise ValueError("Exchange: two tensors have the same name: give each its own name")
            self._found = {
                known: bucket
                for known, bucket in self._found.items()
                if layout.names.isdisjoint(bucket.layout.names)
            }
            self._found[key] = Bucket(layout)
            self._numels.update({s.name: s.numel for s in segments if not s.exempt})
        return self._found[key]

    def mean_of(self, bucket: Bucket) -> Layout:
        """Return a layout for the mean of a bucket whose own layout keeps the new residuals.

        All buckets share its memory, which a round uses up to its end.
        """
        work = bucket.layout.work
        storage = self._storage.get(work.device)
        if storage is None or storage.numel() < work.numel():
            storage = self._storage[work.device] = torch.empty_like(work)
        if bucket.mean is None or bucket.mean.work.data_ptr() != storage.data_ptr():
            bucket.mean = bucket.layout.over(storage)
        return bucket.mean
