"""``torch.distributed.checkpoint``: every rank's own state in a checkpoint that all ranks write."""

import io
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from comm_hooks.checkpoints.rank_files import RankState
from comm_hooks.checkpoints.saved_state import (
    RANKS,
    STATE,
    content_of,
    exchange_of,
    require_one_partition,
    tell_all,
)
from comm_hooks.exchange import Exchange
from comm_hooks.exchange.sealing import require_seal, sealed


class RankStates:
    """Puts what each rank must save for itself into a distributed checkpoint.

    Such a checkpoint keeps one copy of what goes by one name, so residuals under one name would all
    be those of one rank.  Here each rank's state is one tensor of bytes under a name of its own.

    Args:
        state: a :class:`~comm_hooks.CompressionState`, an :class:`~comm_hooks.Exchange`, or rounds
            of local work.

    Not supported: ``dcp.load`` itself, which wants to know all sizes before it reads: use
    :meth:`load`; ranks without ``torch.distributed`` (MPI).

    Example::

        >>> import tempfile
        >>> import torch.distributed.checkpoint as dcp
        >>> from comm_hooks import register
        >>> from comm_hooks.checkpoints.distributed_checkpoint import RankStates
        >>> state = register(ddp_model, "topk")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = dcp.save({"hook": RankStates(state)}, checkpoint_id=folder)
        ...     RankStates(state).load("hook", folder)
    """

    def __init__(self, state: RankState | Exchange) -> None:
        self._state = state
        self._transport = exchange_of(state).transport

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's state as bytes, under the name of the rank; for ``dcp.save``.

        Raises:
            ValueError: if ``dcp.save`` writes for fewer ranks than exchange, as it does where they
                meet by MPI alone: each would write the whole checkpoint over the others'.
        """
        writers = dist.get_world_size() if dist.is_initialized() else 1
        if writers < self._transport.world_size:
            raise ValueError(
                f"RankStates: dcp.save() writes for {writers} of the {self._transport.world_size} "
                "ranks that exchange, since torch.distributed does not know the others: use "
                "save_rank_file() and load_rank_files()"
            )
        file = io.BytesIO()
        torch.save(sealed(content_of(self._state, self._transport)), file)
        return {
            f"rank{self._transport.own_name}": torch.frombuffer(
                bytearray(file.getvalue()), dtype=torch.uint8
            )
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise ``ValueError``: see :meth:`load`."""
        raise ValueError(
            "dcp.load() cannot load what ranks saved for themselves: call RankStates(state).load() "
            "with the name and the checkpoint"
        )

    def load(self, name: str, checkpoint: str | os.PathLike[str] | StorageReader) -> None:
        """Restore what the ranks saved; every rank must call it.

        Among the same ranks as then each loads its own state, among others, in other nodes or with
        another ``collective`` all load those of all that exchanged then
        (:meth:`~comm_hooks.Exchange.load_state_dicts`).

        Args:
            name: under which this object was given to ``dcp.save``.
            checkpoint: its folder, or what reads it.

        Raises:
            ValueError: on all ranks alike, if states are missing, damaged, or do not fit.
        """
        if isinstance(checkpoint, StorageReader):
            reader = checkpoint
        else:
            reader = FileSystemReader(checkpoint)
        problem = None
        try:
            self._load(name, reader)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = str(error) or repr(error)
        for other in tell_all(self._state, problem):
            if other is not None:
                raise ValueError(f"the states under {name!r} cannot be loaded: {other}")

    def _load(self, name: str, reader: StorageReader) -> None:
        prefix = f"{name}.rank"
        found = {
            int(key.removeprefix(prefix)): entry
            for key, entry in reader.read_metadata().state_dict_metadata.items()
            if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }

        def read(rank: int) -> dict[str, Any]:
            if rank not in found:
                raise ValueError(f"the checkpoint has states of ranks {sorted(found)} under it")
            key = f"{prefix}{rank}"
            octets: dict[str, Any] = {key: torch.empty(found[rank].size, dtype=torch.uint8)}
            # Each rank for itself: those of a larger number of ranks read more.
            load(octets, storage_reader=reader, no_dist=True)
            file = torch.load(io.BytesIO(octets[key].numpy().tobytes()), weights_only=True)
            require_seal(file)
            return dict(file)

        ranks = list(self._transport.ranks)
        first, exchange = read(ranks[0]), exchange_of(self._state)
        own, here = first, self._transport.own_name
        if here != ranks[0] and (here in found or first[RANKS] == ranks):
            own = read(here)
        require_one_partition(first[RANKS], [own[RANKS]])
        routes = exchange.settings.collective, exchange.ranks_per_node
        saved = (first[STATE].get(key) for key in ("collective", "ranks_per_node"))
        if first[RANKS] == ranks and tuple(saved) == routes:
            self._state.load_state_dict(own[STATE])
        else:
            self._state.load_state_dicts([read(rank)[STATE] for rank in first[RANKS]])
