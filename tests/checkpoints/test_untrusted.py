"""Checkpoints of strangers run no code, and take no memory that they do not fill."""

import os
import pickle
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from comm_hooks import Exchange, TopK
from comm_hooks.checkpoints.distributed_checkpoint import RankStates
from comm_hooks.checkpoints.rank_files import load_rank_files, save_rank_file
from comm_hooks.checkpoints.sealing import SEAL
from comm_hooks.collectives import Simulated
from tests.ranks import RanksOf


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


def exchanged() -> Exchange:
    exchange = Exchange(TopK(density=0.1), min_numel=1)
    exchange.average_({"weight": torch.ones(8, 8)})
    return exchange


def load_metadata_with_code(folder: str, made: str) -> str:
    exchange = exchanged()
    dcp.save({"hook": RankStates(exchange)}, checkpoint_id=folder)
    RankStates(exchange).load("hook", folder)
    with Path(folder, ".metadata").open("wb") as file:
        pickle.dump(Evil(made), file)
    try:
        RankStates(exchange).load("hook", folder)
    except ValueError as error:
        return str(error)
    return "loaded"


def test_metadata_of_a_checkpoint_runs_no_code(ranks_of: RanksOf, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (said,) = ranks_of(1).run(load_metadata_with_code, str(tmp_path / "saved"), str(made))
    assert "cannot be read (the metadata of the checkpoint names posix.mkdir" in said
    assert not made.exists()


def test_a_small_file_does_not_fill_the_memory(tmp_path: Path) -> None:
    (transport,) = Simulated(1)
    exchange = Exchange(TopK(density=0.1), transport=transport, min_numel=1)
    exchange.average_({"weight": torch.ones(8, 8)})
    save_rank_file(exchange, tmp_path)
    path = tmp_path / "rank0.pt"
    entry = torch.load(path, weights_only=True)
    entry["state"]["memory"]["weight"] = torch.zeros(1).expand(1 << 29)
    entry["state"][SEAL] = entry[SEAL] = "0" * 32
    torch.save(entry, path)
    assert path.stat().st_size < 10_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="the state is damaged"):
        load_rank_files(exchange, tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_a_deeply_nested_state_is_damaged(tmp_path: Path) -> None:
    (transport,) = Simulated(1)
    exchange = Exchange(TopK(density=0.1), transport=transport, min_numel=1)
    exchange.average_({"weight": torch.ones(8, 8)})
    nested: Any = {}
    for _ in range(5000):
        nested = {"a": nested}
    state = {**exchange.state_dict(), "provenance": nested}
    with pytest.raises(ValueError, match="the state is damaged"):
        exchange.load_state_dict(state)
