"""Files in DeepSpeed's checkpoints: what every rank must save for itself.

DeepSpeed saves one rank's state for all (stage 0) or flat shards of it (stages 1 and 2).  Residuals
are whole and differ between ranks, so each rank writes a file of its own into the checkpoint's
folder, before DeepSpeed writes anything: ``latest`` never points to a checkpoint without them.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from comm_hooks.exchange import Exchange
from comm_hooks.frameworks.rank_files import load_rank_files, save_rank_file

_FOLDER = "comm_hooks"
_UNIVERSAL = "_universal"


def include(engine: Any, state: Any) -> None:
    """Let an engine's ``save_checkpoint`` and ``load_checkpoint`` include what each rank has.

    Args:
        engine: a ``DeepSpeedEngine``.
        state: an exchange, or what else is a
            :class:`~comm_hooks.frameworks.rank_files.RankState`.

    See :mod:`comm_hooks.frameworks.rank_files` for what they raise.
    """
    save_engine, load_engine = engine.save_checkpoint, engine.load_checkpoint
    load_signature = inspect.signature(load_engine)

    def save_checkpoint(save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        name = str(tag) if tag is not None else f"global_step{engine.global_steps}"
        save_rank_file(_EngineState(engine, state), Path(save_dir) / name / _FOLDER)
        return save_engine(save_dir, tag, *args, **kwargs)

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
    """What a rank saves: the exchange's state, the optimizer's own, and the step they are of."""

    def __init__(self, engine: Any, state: Any) -> None:
        self.exchange: Exchange = state if isinstance(state, Exchange) else state.exchange
        self._engine = engine
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._state.state_dict(),
            "global_steps": self._engine.global_steps,
            "exchanged_by": self._exchanged_by,
        }

    @property
    def _exchanged_by(self) -> str:
        """What the residuals are of: gradients, or what an optimizer exchanges instead."""
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
            if state.get("global_steps") != self._engine.global_steps:
                raise ValueError(
                    f"the files are of step {state.get('global_steps')}, but the checkpoint of "
                    f"step {self._engine.global_steps}: a save was interrupted, or files were "
                    f"mixed. Delete the checkpoint's folder {_FOLDER} to go on with residuals of "
                    "zero"
                )
            if state.get("exchanged_by") != self._exchanged_by:
                raise ValueError(
                    f"the residuals saved by {state.get('exchanged_by')} are not those of "
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
                f"{', '.join(strangers[:3])}"
            )


def _source(folder: Path) -> Path:
    """Return where the files are: ``ds_to_universal`` does not copy them."""
    if not (folder / _FOLDER).exists() and folder.name.endswith(_UNIVERSAL):
        folder = folder.with_name(folder.name.removesuffix(_UNIVERSAL))
    return folder / _FOLDER
