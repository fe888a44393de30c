"""Save the state of every rank in a checkpoint of ``torch.distributed.checkpoint`` (DCP)."""

import io
import os
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from comm_hooks.checkpoints.protocol import RankState, exchange_of
from comm_hooks.checkpoints.restoring import Storage, entry_of, restore


class RankStates:
    """Adds the state of every rank to a distributed checkpoint.

    A checkpoint keeps one tensor under each name, so residuals under one name would be those of a
    single rank.  Here the state of each rank is a tensor of bytes under a name of its own.

    Args:
        state: a :class:`~comm_hooks.CompressionState`, an :class:`~comm_hooks.Exchange`, or
            :class:`~comm_hooks.optim.LocalRounds`.

    Not supported: ``dcp.load`` itself, which needs all sizes before it reads: use :meth:`load`;
    ranks without ``torch.distributed`` (MPI).

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

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._transport = exchange_of(state).transport

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's state as bytes, under the name of the rank; for ``dcp.save``.

        Collective: ranks compare their parameters.

        Raises:
            PayloadError: on all ranks, if their parameters differ.
            ValueError: if ``dcp.save`` writes for fewer ranks than exchange, as with MPI alone:
                each rank would overwrite the checkpoint of the others.
        """
        writers = dist.get_world_size() if dist.is_initialized() else 1
        if writers < self._transport.world_size:
            raise ValueError(
                f"RankStates: dcp.save() writes for {writers} of the {self._transport.world_size} "
                "ranks that exchange, since torch.distributed does not know the others: use "
                "save_rank_file() and load_rank_files()"
            )
        exchange_of(self._state).compare_replicas()
        file = io.BytesIO()
        torch.save(entry_of(self._state), file)
        return {
            f"rank{self._transport.own_name}": torch.frombuffer(
                bytearray(file.getvalue()), dtype=torch.uint8
            )
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise ``ValueError``, since ``dcp.load`` calls it: use :meth:`load` instead."""
        raise ValueError(
            "dcp.load() cannot load the states of single ranks: call "
            "RankStates(state).load(name, checkpoint)"
        )

    def load(self, name: str, checkpoint: str | os.PathLike[str] | StorageReader) -> None:
        """Restore the states of all ranks; every rank must call it.

        On the same ranks as at the save, each rank restores its own state; otherwise each rank
        reads the states of all ranks that saved, and merges them.

        Args:
            name: the key under which this object was given to ``dcp.save``.
            checkpoint: the folder of the checkpoint, whose metadata may be a stranger's: it is
                unpickled with the classes of such metadata alone; or a reader, which may not.

        Raises:
            ValueError: on all ranks alike, if states are missing, damaged, or not of this model.
        """
        reader = checkpoint if isinstance(checkpoint, StorageReader) else _PlainReader(checkpoint)

        def read(rank: int) -> dict[str, Any]:
            key = f"{name}.rank{rank}"
            entry = reader.read_metadata().state_dict_metadata.get(key)
            if not isinstance(entry, TensorStorageMetadata):
                raise FileNotFoundError(key)
            octets: dict[str, Any] = {key: torch.empty(entry.size, dtype=torch.uint8)}
            # Each rank for itself: on fewer ranks than before each reads several states.
            load(octets, storage_reader=reader, no_dist=True)
            file = io.BytesIO(octets[key].numpy().tobytes())
            return torch.load(file, weights_only=True)

        storage = Storage("the checkpoint", lambda rank: f"the state {name}.rank{rank}", read)
        if not restore(self._state, storage):
            raise ValueError(f"RankStates: the checkpoint has no states of ranks under {name!r}")


class _PlainReader(FileSystemReader):
    """A reader of a checkpoint that runs no code of the checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler of what torch writes as the metadata of a checkpoint, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module in _MODULES else None
        if name in _MODULES.get(module, ()) or isinstance(found, _VALUES):
            return found
        raise pickle.UnpicklingError(f"the metadata of the checkpoint names {module}.{name}")


_PATHS = "Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"
_VALUES = torch.dtype, torch.layout, torch.memory_format
_MODULES: dict[str, tuple[str, ...]] = {
    "torch": ("Size",),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "collections": ("OrderedDict",),
    "torch.serialization": ("_get_layout",),  # looks a name up in a dictionary
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}
