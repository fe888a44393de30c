"""Add one file for each rank to DeepSpeed's checkpoints.

DeepSpeed saves one rank's state for all (stage 0) or flat shards of it (stages 1 and 2).  Residuals
are whole and differ between ranks, so each rank writes a file of its own into the checkpoint's
folder before DeepSpeed writes anything: ``latest`` never points to a checkpoint without them.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from comm_hooks.checkpoints.protocol import exchange_of, has_clients
from comm_hooks.checkpoints.rank_files import load_rank_files, save_rank_file

_FOLDER = "comm_hooks"
_UNIVERSAL = "_universal"


def include(engine: Any, state: Any) -> None:
    """Let an engine's ``save_checkpoint`` and ``load_checkpoint`` include each rank's file.

    Args:
        engine: a ``DeepSpeedEngine``.
        state: an exchange, or another :class:`~comm_hooks.checkpoints.rank_files.RankState`.

    Both methods then raise the errors of :mod:`comm_hooks.checkpoints.rank_files`.
    """
    save_engine, load_engine = engine.save_checkpoint, engine.load_checkpoint
    load_signature = inspect.signature(load_engine)

    def save_checkpoint(save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        own = _EngineState(engine, state)
        # DeepSpeed's default, global_step<N>; with clients, step counts differ between ranks.
        name = f"{own.unit}{own.now}" if tag is None else str(tag)
        save_rank_file(own, Path(save_dir) / name / _FOLDER)
        return save_engine(save_dir, name, *args, **kwargs)

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        path, client_state = load_engine(*args, **kwargs)
        call = load_signature.bind(*args, **kwargs)
        call.apply_defaults()
        goes_on = call.arguments["load_optimizer_states"]
        if path is not None and goes_on and not call.arguments["load_module_only"]:
            load_rank_files(_EngineState(engine, state), _source(Path(path).parent))
        return path, client_state

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


class _EngineState:
    """The state in a rank's file: residuals, optimizer state, and the step for a check at load."""

    def __init__(self, engine: Any, state: Any) -> None:
        self.exchange = exchange_of(state)
        self._engine = engine
        self._state = state
        # Ranks that play different clients take different numbers of steps.
        self.unit = "round" if has_clients(state) else "global_step"

    @property
    def now(self) -> int:
        """The present step or round, the same on all ranks."""
        return int(self._state.round_index if self.unit == "round" else self._engine.global_steps)

    def state_dict(self) -> dict[str, Any]:
        return {**self._state.state_dict(), self.unit: self.now, "exchanged_by": self._exchanged_by}

    @property
    def _exchanged_by(self) -> str:
        """The kind of the residuals' owner: an optimizer's class name, or the gradient exchange."""
        owner = self.exchange.owner
        return type(owner).__name__ if isinstance(owner, Optimizer) else "the exchange of gradients"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._check([state])
        self._state.load_state_dict(state)

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._check(states)
        self._state.load_state_dicts(states)

    def _check(self, states: Sequence[Mapping[str, Any]]) -> None:
        for state in states:
            if state.get(self.unit) != self.now:
                unit = self.unit.removeprefix("global_")
                there, here = (f"{unit} {time}" for time in (state.get(self.unit), self.now))
                raise ValueError(
                    f"the rank files in the checkpoint's folder {_FOLDER} are of {there}, but the "
                    f"checkpoint of {here}: a save was interrupted, or files were mixed. Delete "
                    "that folder to go on with residuals of zero"
                )
            if state.get("exchanged_by") != self._exchanged_by:
                raise ValueError(
                    f"the residuals saved by {state.get('exchanged_by')} do not fit "
                    f"{self._exchanged_by}: load the model alone, with load_module_only=True"
                )
        if self.exchange.memory is None:
            return
        memories = [state.get("memory", {}) for state in states]
        saved = {name for m in memories for name in self.exchange.memory.parameters_in(m)}
        strangers = sorted(saved - set(self._engine.param_names.values()))
        if strangers:
            raise ValueError(
                f"the checkpoint has residuals of parameters that this model does not have: "
                f"{', '.join(strangers[:3])}: load it into the model that saved it"
            )


def _source(folder: Path) -> Path:
    """Return the folder of the ranks' files: for a universal checkpoint, that of its source."""
    if not (folder / _FOLDER).exists() and folder.name.endswith(_UNIVERSAL):
        folder = folder.with_name(folder.name.removesuffix(_UNIVERSAL))
    return folder / _FOLDER
