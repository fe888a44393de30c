"""Side files in DeepSpeed's checkpoints: what every rank must save for itself.

DeepSpeed saves one rank's state for all (stage 0) or flat shards of it (stages 1 and 2).  Residuals
are whole and differ between ranks, so each rank writes a file of its own into the checkpoint's
folder, before DeepSpeed writes anything: ``latest`` never points to a checkpoint without them.
"""

import inspect
import os
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.exchange import Exchange
from comm_hooks.frameworks.deepspeed import optimizers

_NAME = "comm_hooks_rank{rank:05d}_of{ranks:05d}.pt"
_PATTERN = re.compile(r"comm_hooks_rank(\d{5})_of(\d{5})\.pt")
_UNIVERSAL = "_universal"


def include(engine: Any, exchange: Exchange) -> None:
    """Let an engine's ``save_checkpoint`` and ``load_checkpoint`` include an exchange."""
    save_engine, load_engine = engine.save_checkpoint, engine.load_checkpoint
    load_signature = inspect.signature(load_engine)

    def save_checkpoint(save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        name = str(tag) if tag is not None else f"global_step{engine.global_steps}"
        save(engine, exchange, Path(save_dir) / name)
        return save_engine(save_dir, tag, *args, **kwargs)

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        path, client_state = load_engine(*args, **kwargs)
        call = load_signature.bind(*args, **kwargs)
        call.apply_defaults()
        goes_on = call.arguments["load_optimizer_states"]
        if path is not None and goes_on and not call.arguments["load_module_only"]:
            load(engine, exchange, Path(path).parent)
        return path, client_state

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def save(engine: Any, exchange: Exchange, folder: Path) -> None:
    """Write this rank's file; all ranks must call it.

    Raises:
        ValueError: on all ranks, if any of them cannot write its file.
    """
    rank, ranks = exchange.transport.rank, exchange.transport.world_size
    path = folder / _NAME.format(rank=rank, ranks=ranks)
    content = {
        "exchange": exchange.state_dict(),
        "optimizer": optimizers.state_dict(engine),
        "global_steps": engine.global_steps,
    }
    problem = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            for other, size in _side_files(folder):
                if size != ranks:
                    # Of an older checkpoint with this tag: it would mix with the new one.
                    other.unlink(missing_ok=True)
        partial = path.with_suffix(".tmp")
        torch.save(content, partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        problem = f"{path} cannot be written: {error}"
    _raise_together(exchange, problem)


def load(engine: Any, exchange: Exchange, folder: Path) -> None:
    """Restore from a checkpoint's side files; all ranks must call it.

    On as many ranks as then each reads its own file, on another number all files.  Without any, a
    warning, and residuals start at zero.

    Raises:
        ValueError: on all ranks, if files are incomplete, of another step, or do not fit.
    """
    rank, ranks = exchange.transport.rank, exchange.transport.world_size
    problem, contents = None, []
    source = _source(folder)
    sizes = {size for _, size in _side_files(source)}
    then = ranks if ranks in sizes or not sizes else min(sizes)
    try:
        if sizes:
            wanted = [rank] if then == ranks else range(then)
            contents = [_read(engine, source / _NAME.format(rank=r, ranks=then)) for r in wanted]
            states = [content["exchange"] for content in contents]
            _check_names(engine, exchange, states)
            _restore(exchange, states, source, then)
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        problem = str(error)
    _raise_together(exchange, problem)
    found = exchange.transport.perform(AllGatherObject(bool(contents)))
    if not any(found):
        warnings.warn(
            f"{folder} has no files {_PATTERN.pattern}: it was saved without comm_hooks. "
            f"Residuals start at zero",
            stacklevel=3,
        )
        return
    missing = [r for r, is_found in enumerate(found) if not is_found]
    _raise_together(exchange, f"{folder} has no side files on ranks {missing}" if missing else None)
    states = [content["optimizer"] for content in contents]
    if then == ranks:
        optimizers.load_state_dict(engine, states[0])
    else:
        optimizers.load_state_dicts(engine, states)


def _check_names(engine: Any, exchange: Exchange, states: list[Any]) -> None:
    if exchange.memory is None:
        return
    saved = {n for state in states for n in exchange.memory.parameters_in(state.get("memory", {}))}
    strangers = sorted(saved - set(engine.param_names.values()))
    if strangers:
        raise ValueError(
            f"the checkpoint has residuals of parameters that this model does not have: "
            f"{', '.join(strangers[:3])}"
        )


def _restore(exchange: Exchange, states: list[Any], source: Path, then: int) -> None:
    if then != exchange.transport.world_size:
        exchange.load_state_dicts(states)
        return
    try:
        exchange.load_state_dict(states[0])
    except ValueError:
        if exchange.memory is None or "memory" not in states[0]:
            raise
        # Shards that the present collective does not have: they need what all ranks saved.
        paths = [source / _NAME.format(rank=r, ranks=then) for r in range(then)]
        everything = [torch.load(p, map_location="cpu", weights_only=True) for p in paths]
        exchange.load_state_dicts([content["exchange"] for content in everything])


def _read(engine: Any, path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"{path} is missing: every rank's file is needed")
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if content["global_steps"] != engine.global_steps:
        raise ValueError(
            f"{path} is of step {content['global_steps']}, but the checkpoint of step "
            f"{engine.global_steps}: a save was interrupted, or files were mixed. Delete "
            f"comm_hooks_rank*.pt there to go on with residuals of zero"
        )
    return content


def _source(folder: Path) -> Path:
    """Return where the side files are: ``ds_to_universal`` does not copy them."""
    if not _side_files(folder) and folder.name.endswith(_UNIVERSAL):
        return folder.with_name(folder.name.removesuffix(_UNIVERSAL))
    return folder


def _side_files(folder: Path) -> list[tuple[Path, int]]:
    """Return the side files of a folder, each with the number of ranks that saved it."""
    matches = [(path, _PATTERN.fullmatch(path.name)) for path in sorted(folder.glob("*"))]
    return [(path, int(match[2])) for path, match in matches if match]


def _raise_together(exchange: Exchange, problem: str | None) -> None:
    """Raise ``ValueError`` on all ranks if there is a problem on one."""
    for rank, other in enumerate(exchange.transport.perform(AllGatherObject(problem))):
        if other is not None:
            raise ValueError(f"rank {rank}: {other}")
