"""What an exchange knows of each bucket."""

from collections.abc import Callable, Hashable, Iterator, Sequence

import torch

from comm_hooks.exchange.layout import Granularity, Layout, Segment
from comm_hooks.exchange.routes import Route


class Bucket:
    """One bucket: where its vectors are laid out, how they travel, and what ranks know of it.

    Attributes:
        layout: the workspace.
        routes: how it travels, by whatever that depends on.
        digest: 32 bits of the settings and tensors that all ranks must have in common, or None.
        compared: whether ranks have compared the tensors.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.routes: dict[Hashable, Route] = {}
        self.digest: int | None = None
        self.compared = False


class Buckets:
    """The buckets of an exchange, each made when it is first met.

    A bucket that shares a parameter with a new one is gone: DDP has rebuilt its buckets.

    Args:
        granularity: what a compressor sees as one vector.
    """

    def __init__(self, granularity: Granularity) -> None:
        self._granularity = granularity
        self._found: dict[Hashable, Bucket] = {}

    def __iter__(self) -> Iterator[Bucket]:
        return iter(dict.fromkeys(self._found.values()))

    def __len__(self) -> int:
        return len(set(self._found.values()))

    def find(
        self, key: Hashable, device: torch.device, segments: Callable[[], Sequence[Segment]]
    ) -> Bucket:
        """Return the bucket that was found under this key before, or that of these segments.

        Raises:
            ValueError: if two segments have the same name.
        """
        bucket = self._found.get((key, device))
        if bucket is None:
            bucket = self._found[key, device] = self._of(tuple(segments()), device)
        return bucket

    def _of(self, segments: tuple[Segment, ...], device: torch.device) -> Bucket:
        if (segments, device) not in self._found:
            names = {segment.name for segment in segments}
            if len(names) < len(segments):
                raise ValueError("parameter names must be distinct within a bucket")
            self._found = {
                key: bucket
                for key, bucket in self._found.items()
                if names.isdisjoint(bucket.layout.names)
            }
            layout = Layout(segments, device, self._granularity)
            self._found[segments, device] = Bucket(layout)
        return self._found[segments, device]
