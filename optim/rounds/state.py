"""The state of an optimizer of local steps: shared model, local progress, residuals, counters."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from comm_hooks.checkpoints.sealing import SEAL, require_seal, sealed
from comm_hooks.exchange import Exchange
from comm_hooks.exchange.saved_state import check_whole, seal_own
from comm_hooks.optim.base import by_name, names_of, parameters_of, require_distinct_names
from comm_hooks.optim.frozen import trains
from comm_hooks.optim.rounds.client_states import ClientStates
from comm_hooks.optim.rounds.clock import FragmentClock
from comm_hooks.optim.rounds.shared_buffers import SharedBuffers
from comm_hooks.optim.rounds.shared_model import SharedModel
from comm_hooks.shards import whole
from comm_hooks.warnings import warn_program

Tensors = dict[str, torch.Tensor]


class RoundsState:
    """The state of an optimizer of local steps: the shared model, counters, states of clients.

    One object holds them because frameworks wrap an optimizer by copying its attributes, and the
    wrapper and the optimizer must use the same counters.

    Args:
        owner: the class name of the optimizer of local steps, for messages.
        inner, exchange, server: see :class:`~comm_hooks.optim.LocalRounds`.
        fragments, local_steps: see :class:`FragmentClock`.
        keep_inner: whether the inner optimizer's state of a client is kept until its next turn.

    Attributes:
        parameters: the exchanged parameters: trainable at construction, not empty on this rank.
        names: the names of :attr:`parameters`.
        groups: the index of each parameter's group, (P,) for P parameters.
        model: the shared model.
        buffers: the model's buffers that are averaged; none unless a module is registered.
        clock: the counter of local steps, which tells when each fragment is exchanged.
        clients: the residuals and inner optimizer states of this rank's clients.
        decay: the product of 1 - lr weight_decay since each parameter's exchange, float64, (P,).
        round_index: the number of exchanges so far, each of one fragment.
        is_round_open: whether clients are taking their turns.
        left_out: the clients of this rank whose turns in the present round do not count.
    """

    def __init__(
        self,
        owner: str,
        inner: Optimizer,
        exchange: Exchange,
        server: Optimizer,
        *,
        fragments: int,
        local_steps: int | None,
        keep_inner: bool,
    ) -> None:
        self._owner, self._inner, self._exchange, self._server = owner, inner, exchange, server
        members = parameters_of(inner.param_groups)
        groups = [i for i, group in enumerate(inner.param_groups) for _ in group["params"]]
        own = [place for place, p in enumerate(members) if trains(p) and p.numel()]
        self.parameters = [members[place] for place in own]
        self.names = [names_of(inner.param_groups)[place] for place in own]
        require_distinct_names(owner, self.names)
        self.groups = np.array([groups[place] for place in own], dtype=int)
        self.model = SharedModel(self.parameters, server)
        self.buffers = SharedBuffers()
        self.clock = FragmentClock([p.numel() for p in self.parameters], fragments, local_steps)
        self.clients = ClientStates(inner, exchange.memory, keep_inner=keep_inner)
        self.decay = np.ones(len(self.parameters))
        self.round_index = 0
        self.is_round_open = False
        self.left_out: set[int] = set()
        self._loaded_from: int | None = None
        self._is_resumed = False

    def places_of(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """Return the indices in :attr:`parameters` of a model's parameters or of their shards."""
        chosen = {id(p) for p in parameters}
        return [i for i, part in enumerate(self.parameters) if id(whole(part)) in chosen]

    def own_values(self, places: Sequence[int]) -> list[torch.Tensor] | None:
        """Return copies of parameters for :meth:`adopt` if a state was just loaded, else None."""
        if not self._is_resumed:
            return None
        return [self.parameters[i].detach().clone() for i in places]

    @torch.no_grad()
    def adopt(self, places: Sequence[int], own: Sequence[torch.Tensor] | None = None) -> None:
        """Continue from the values that other code has written to the parameters at ``places``.

        A model's checkpoint may hold the shared model.  If it is loaded after the state of this
        optimizer, the shared model stays the same, and this rank's local progress is restored.

        Args:
            places: indices in :attr:`parameters`.
            own: these parameters' values before the write; None to discard local progress.
        """
        if places:
            live = [self.parameters[i].detach() for i in places]
            shared = [self.model.values[i] for i in places]
            if own is not None and all(map(torch.equal, live, shared)):
                torch._foreach_copy_(live, list(own))
            else:
                self.model.adopt(places)
                self.decay[list(places)] = 1.0
        self.model.note()

    def shared_values(self) -> list[torch.Tensor]:
        """Return copies of the shared model's values of :attr:`parameters`."""
        self.begin()
        return [value.clone() for value in self.model.values]

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the parameters, which may be new, to the shared model; only before any step.

        Not while clients take turns: what one of them has changed is not the shared model.
        """
        is_first = self.clock.steps == self.round_index == 0 and not self.is_round_open
        if is_first and not self.model.is_shown:
            torch._foreach_copy_(self.model.values, self.model.own)

    def share_buffers(self, module: nn.Module) -> None:
        """Average the buffers of a module from now on; those that were loaded stay as they are."""
        budget = self.buffers.budget
        self.buffers = SharedBuffers(module)
        self.buffers.budget = budget

    @contextlib.contextmanager
    def showing(self, *, shared: bool) -> Iterator[None]:
        """Give parameters and buffers the shared or this rank's values within the context."""
        if self.model.is_shown == shared:
            yield
            return
        was_written_to = self.model.is_written_to
        for part in (self.model, self.buffers):
            part.show() if shared else part.unshow()
        try:
            yield
        finally:
            for part in (self.model, self.buffers):
                part.unshow() if shared else part.show()
            if not was_written_to:
                self.model.note()

    def require_no_round(self, call: str) -> None:
        """Raise ``ValueError`` if a round of clients is running; ``call`` is the refused method."""
        if self.is_round_open:
            raise ValueError(
                f"{self._owner}: {call} in the middle of a round of clients: call it after the "
                "loop over clients()"
            )

    def release_state_dict(self) -> dict[str, Any]:
        """Return the model, server state and round count: publishable if clients are private."""
        shared = (value.clone() for value in self.model.values)
        # Copies: the state is that of this moment.
        server = copy.deepcopy(self._server.state_dict())
        for group, names in zip(server["param_groups"], self._server_names(), strict=True):
            group["param_names"] = names
        return {
            "model": dict(zip(self.names, shared, strict=True)),
            "server": server,
            "round_index": self.round_index,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, made of plain numbers and tensors."""
        self.require_no_round("state_dict()")
        shared = self.model.values
        own, starts = (
            {
                name: tensor.clone()
                for name, tensor, value in zip(self.names, tensors, shared, strict=True)
                if not torch.equal(tensor, value)
            }
            for tensors in (self.model.own, self.model.starts)
        )
        inner = copy.deepcopy(self._inner.state_dict())
        private = {
            "inner": sealed(inner)[SEAL],
            "kinds": self._kinds,
            "steps": self.clock.steps,
            "exchanged_at": list(self.clock.exchanged_at),
            "fragments": [[self.names[i] for i in part] for part in self.clock.fragments],
            "decay": dict(zip(self.names, self.decay.tolist(), strict=True)),
            "own": own,
            "starts": starts,
            "buffers": self.buffers.state_dict(),
            "clients": self.clients.state_dict(),
        }
        rounds = sealed({"released": self.release_state_dict(), "private": private})
        return {**self._exchange.state_dict(), **inner, "rounds": rounds}

    def load_state_dict(self, state: Mapping[str, Any], *, is_merging: bool = False) -> None:
        """Restore the state that one rank saved.

        From the state of another rank, or of another number of ranks, residuals and local progress
        are not restored: several ranks could count them.

        Args:
            state: the result of :meth:`state_dict` on a rank.
            is_merging: True never restores residuals and local progress.

        Raises:
            ValueError: if the state is not one of local steps, is damaged, or has other parameters;
                within a round of clients.
        """
        self.require_no_round("load_state_dict()")
        transport = self._exchange.transport
        rounds, inner = self._checked(state)
        released, private = rounds["released"], rounds["private"]
        here: dict[str, int | None] = {
            "rank": transport.rank,
            "world_size": transport.world_size,
            "ranks_per_node": self._exchange.ranks_per_node,
        }
        server = released["server"]
        if state["world_size"] != transport.world_size:
            # The outer step belongs to a number of ranks: this run's, not the saved one's.
            server = {**server, "param_groups": self._server.state_dict()["param_groups"]}
        loaded_from = None
        if is_merging or any(state.get(key) != value for key, value in here.items()):
            loaded_from = state["rank"]
            shared = {**private["buffers"], "own": {}}
            private = {**private, "own": {}, "starts": {}, "clients": {}, "buffers": shared}
            residuals: Any = {key: {} for key in {"memory", "server_memory"} & state.keys()}
            others = {key: value for key, value in state.items() if key not in here}
            known = {key: value for key, value in here.items() if value is not None}
            state = seal_own({**others, **residuals, **known})
        self._exchange.load_state_dict(state)
        self.clients.load_state_dict(private["clients"])
        # Torch's optimizers go on with the tensors that they are given.
        self._inner.load_state_dict(by_name(self._inner, copy.deepcopy(inner)))
        self._server.load_state_dict(
            by_name(self._server, copy.deepcopy(dict(server)), self._server_names())
        )
        values = released["model"]
        with self.showing(shared=False):
            self.model.load(
                self._in_order(values),
                starts=self._in_order(values | private["starts"]) if private["starts"] else None,
                own=self._in_order(values | private["own"]),
            )
            self.buffers.load_state_dict(private["buffers"])
        self.round_index = released["round_index"]
        place_of = {name: place for place, name in enumerate(self.names)}
        fragments = [[place_of[name] for name in part] for part in private["fragments"]]
        if self.clock.load(private["steps"], private["exchanged_at"], fragments):
            self.decay[:] = self._in_order(private["decay"])
        else:
            self.decay[:] = 1.0
        self._loaded_from = loaded_from
        self._is_resumed = True

    def load_merged(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the states of all saved ranks on another number of ranks, or on other nodes.

        1. Start at the saved shared model, with the inner optimizer's state of one saved rank.
        2. Add each saved rank's local progress to its residual, if that is whole and in float32.
        3. Let the exchange divide the residuals among the present ranks.
        4. Start each rank with the mean of the progress that was not added in step 2.

        So the mean over ranks of progress plus residuals stays the same.

        Raises:
            ValueError: if the states include states of clients.
        """
        if any(state["rounds"]["private"]["clients"] for state in states):
            ranks = self._exchange.transport.world_size
            raise ValueError(
                f"{self._owner}: the clients' states of {len(states)} ranks cannot go on with "
                f"{ranks} ranks, or in other nodes: load the model only, and make a new optimizer"
            )
        first = states[self._exchange.transport.rank % len(states)]
        self.load_state_dict(first, is_merging=True)
        decay = self._in_order(states[0]["rounds"]["private"]["decay"])
        with torch.no_grad():
            self.model.shrink(range(len(self.parameters)), decay)
            with self.showing(shared=False):
                self.model.restore()
            self.model.note()
        merged = [self._with_progress(state) for state in states]
        self._exchange.load_state_dicts([state for state, _ in merged])
        is_ahead = self._start_with_mean([progress for _, progress in merged])
        # Only whether anything is outstanding matters.
        self.clock.exchanged_at = [self.clock.steps - is_ahead] * len(self.clock.exchanged_at)
        self.decay[:] = 1.0
        self._loaded_from = None

    def warn_of_losses(self) -> None:
        """Warn, once after loading, of residuals or local progress that the next step loses."""
        is_resumed, self._is_resumed = self._is_resumed, False
        if is_resumed and self.model.is_written_to:
            warn_program(
                f"{self._owner}: parameters were written to after load_state_dict() had restored "
                "this rank's local progress in them: load or broadcast the model first, then call "
                f"{self._owner}.load_state_dict()"
            )
        # Until now it could have been restored from this rank's own file.
        other, self._loaded_from = self._loaded_from, None
        if other is not None:
            warn_program(
                f"{self._owner}: this rank goes on from the state that rank {other} saved, without "
                "its residual and local progress: call save_rank_file(optimizer, folder) on every "
                "rank when saving a checkpoint, and load_rank_files(optimizer, folder) when "
                "loading it"
            )

    def _checked(self, state: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Return a state's "rounds" and inner optimizer state; ``ValueError`` if they are unfit."""
        rounds = state.get("rounds")
        if not isinstance(rounds, Mapping):
            raise ValueError(
                f"{self._owner}: the state is not that of an optimizer of local steps: load a "
                f"result of {self._owner}.state_dict()"
            )
        require_seal(rounds)
        check_whole(state)
        if (kinds := rounds["private"]["kinds"]) != self._kinds:
            raise ValueError(
                f"{self._owner}: the state was saved with {' and '.join(kinds)}, the optimizers "
                f"here are {' and '.join(self._kinds)}: make those that saved it"
            )
        inner = {key: state[key] for key in self._inner.state_dict() if key in state}
        require_seal({**inner, SEAL: rounds["private"]["inner"]})
        shapes = {n: tuple(v.shape) for n, v in zip(self.names, self.model.values, strict=True)}
        saved = {name: tuple(each.shape) for name, each in rounds["released"]["model"].items()}
        if saved != shapes:
            name = next(n for n in (*saved, *shapes) if saved.get(n) != shapes.get(n))
            raise ValueError(
                f"{self._owner}: the state has other parameters than this model: it has "
                f"{len(saved)}, the model {len(shapes)}; {name!r} has the shape "
                f"{saved.get(name, 'absent')} in the state, {shapes.get(name, 'absent')} here"
            )
        return rounds, inner

    def _in_order(self, of_name: Mapping[str, Any]) -> list[Any]:
        return [of_name[name] for name in self.names]

    @property
    def _kinds(self) -> list[str]:
        return [type(self._inner).__name__, type(self._server).__name__]

    def _server_names(self) -> list[list[str]]:
        """Return the names of the parameters of each group of the server optimizer."""
        groups = self._inner.param_groups
        names = dict(zip(map(id, parameters_of(groups)), names_of(groups), strict=True))
        return [[names[id(p)] for p in group["params"]] for group in self._server.param_groups]

    @torch.no_grad()
    def _start_with_mean(self, progress: Sequence[Tensors]) -> bool:
        """Move the parameters by the mean of all ranks' progress; return whether there was any."""
        found = {name for of_one in progress for name in of_one}
        with self.showing(shared=False):
            for name, parameter in zip(self.names, self.parameters, strict=True):
                if name in found:
                    total = torch.stack([each[name] for each in progress if name in each]).sum(0)
                    parameter.sub_((total / len(progress)).view(parameter.shape).to(parameter))
        self.model.note()
        return bool(found)

    def _with_progress(self, state: Mapping[str, Any]) -> tuple[Mapping[str, Any], Tensors]:
        """Return a rank's state with local progress added to residuals, and the remaining progress.

        The latter is that of parameters without a residual, or with one that is incomplete or of
        another dtype: float32 tensors (numel,) by parameter name.
        """
        released, private = (state["rounds"][key] for key in ("released", "private"))
        memory, rest = dict(state.get("memory", {})), {}
        has_whole_rows = state.get("ranks_per_node") in (None, 1)
        for name, own in private["own"].items():
            start = private["starts"].get(name, released["model"][name])
            done = (private["decay"][name] * start - own).flatten().float().cpu()
            row = memory.get(name)
            if has_whole_rows and row is not None and row.dtype == done.dtype:
                memory[name] = row + done
            else:
                rest[name] = done
        if "memory" in state:
            state = seal_own({**state, "memory": memory})
        return state, rest
