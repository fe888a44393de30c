"""What rounds of local work have counted, save and may show."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from comm_hooks.callers import warn_program
from comm_hooks.checkpoints.sealing import SEAL, require_seal, sealed
from comm_hooks.exchange import Exchange
from comm_hooks.exchange.saved_state import check_complete, check_whole, seal_own
from comm_hooks.optim.base import names_of, parameters_of, require_distinct_names
from comm_hooks.optim.frozen import FrozenParameters, trains
from comm_hooks.optim.rounds.clients import ClientStates
from comm_hooks.optim.rounds.shared_model import SharedModel
from comm_hooks.optim.wrapping import WrappingOptimizer
from comm_hooks.shards import shard_groups, whole

Tensors = dict[str, torch.Tensor]


@dataclass
class Progress:
    """What is counted, in one place: frameworks wrap optimizers, and a wrapper must count along.

    Args:
        exchanged_at: for each fragment the step after which it was exchanged last.
        decay: for each parameter the factor by which it has decayed since, float64, (P,).

    Attributes:
        steps: local steps.
        round_index: exchanges, each of a fragment.
        bytes_uncompressed: what all-reducing gradients at each of the steps taken here would have
            sent.
        averaging_ruled_out: whether it has been made sure that nobody else averages them.
        averaging: until then, what this rank's first step of a turn says about that.
        loaded_from: the rank whose state this one goes on from, until it says so.
        resumed: whether a state was loaded, and no step has been taken since.
    """

    exchanged_at: list[int]
    decay: np.ndarray
    steps: int = 0
    round_index: int = 0
    bytes_uncompressed: int = 0
    averaging_ruled_out: bool = False
    averaging: dict[str, Any] | None = None
    loaded_from: int | None = None
    resumed: bool = False


class SavedRounds(WrappingOptimizer):
    """The state of rounds: a server's model and optimizer, and what clients remember.

    Args:
        inner: the optimizer of the local steps.
        exchange: how deltas are averaged.
        server: over the same parameters.
        fragments: how many parts are exchanged at steps of their own.
        keep_inner: whether a client's inner state lasts from turn to turn.
    """

    def __init__(
        self,
        inner: Optimizer,
        exchange: Exchange,
        server: Optimizer,
        *,
        fragments: int,
        keep_inner: bool,
    ) -> None:
        super().__init__(inner)
        self.exchange = exchange
        self.server = server
        members = parameters_of(inner.param_groups)
        groups = [i for i, group in enumerate(inner.param_groups) for _ in group["params"]]
        # What this rank holds nothing of is nothing to exchange.
        own = [place for place, p in enumerate(members) if trains(p) and p.numel()]
        self._frozen = FrozenParameters(self, [p for p in members if not trains(p)])
        self._parameters = [members[place] for place in own]
        self._names = [names_of(inner.param_groups)[place] for place in own]
        require_distinct_names(self, self._names)
        self._group_of = np.array([groups[place] for place in own], dtype=int)
        self._progress = Progress(
            exchanged_at=[0] * fragments, decay=np.ones(len(self._parameters))
        )
        self._model = SharedModel(self._parameters, server)
        self._clients = ClientStates(inner, exchange.memory, keep_inner=keep_inner)
        self._is_round_open = False
        self._is_merging = False  # states of all ranks, of which none is anybody's own

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The parameters that are exchanged: those that trained when the rounds were made."""
        return self._parameters

    @property
    def model_parallel_groups(self) -> list[dist.ProcessGroup]:
        """Groups of ranks that hold other parts of the model: nobody exchanges between these."""
        return shard_groups(self._parameters)

    @property
    def is_written_to(self) -> bool:
        """Whether something but the rounds has written to parameters since they did."""
        return self._model.is_written_to

    @property
    def overwritten(self) -> list[torch.Tensor]:
        """The parameters that something else has changed while they are those all ranks share."""
        return [self._parameters[place] for place in self._model.overwritten]

    @property
    def steps(self) -> int:
        """How many local steps this rank has taken."""
        return self._progress.steps

    @property
    def round_index(self) -> int:
        """How many exchanges there have been, each of a fragment."""
        return self._progress.round_index

    @torch.no_grad()
    def restart(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Go on from where parameters are now, after all ranks have set them alike.

        Whatever else writes to parameters between steps counts as progress of this rank, of which
        the exchange may send little.  What this rank itself had done since the last exchange is
        given up; momenta and residuals stay.  After ``register(model, rounds)``
        ``model.load_state_dict()`` does it by itself.  Sends nothing; all ranks must call it
        between the same steps.

        Args:
            parameters: that have been set; by default all.

        Example::

            >>> from comm_hooks.optim import low_communication
            >>> named = model.named_parameters()
            >>> rounds = low_communication(named, lr=0.01, bits_per_parameter=8.0)
            >>> _ = torch.nn.init.zeros_(model.bias)
            >>> rounds.restart([model.bias])
        """
        places = range(len(self._parameters))
        self.adopt(places if parameters is None else self.places_of(parameters))

    def places_of(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """Return where among :attr:`parameters` a model's parameters are, or this rank's parts."""
        chosen = {id(p) for p in parameters}
        return [i for i, part in enumerate(self._parameters) if id(whole(part)) in chosen]

    def own_to_keep(self, places: Sequence[int]) -> list[torch.Tensor] | None:
        """Return what :meth:`adopt` needs to know before something else writes there, if anything.

        Those are this rank's values, right after a state was loaded.
        """
        if not self._progress.resumed:
            return None
        return [self._parameters[i].detach().clone() for i in places]

    @torch.no_grad()
    def adopt(self, places: Sequence[int], own: Sequence[torch.Tensor] | None = None) -> None:
        """Go on from what has been written there, as :meth:`restart` does.

        A checkpoint has the model as well, and that is the one that all ranks share.  Where it is
        loaded after the rounds' own state it brings nothing new, and what this rank had done since
        the last exchange comes back.

        Args:
            places: among :attr:`parameters`.
            own: this rank's values there, of before; None where they are to be given up.
        """
        if places:
            live, shared = (
                [each[i] for i in places] for each in (self._parameters, self._model.values)
            )
            if own is not None and all(map(torch.equal, live, shared)):
                torch._foreach_copy_([each.detach() for each in live], list(own))
            else:
                self._model.adopt(places)
                self._progress.decay[list(places)] = 1.0
        self._model.note()

    def server_values(self) -> list[torch.Tensor]:
        """Return copies of the server's values of :attr:`parameters`, which are left alone."""
        self._begin()
        return [value.clone() for value in self._model.values]

    @torch.no_grad()
    def _begin(self) -> None:
        """Before all work, begin where the model is: it may have been loaded meanwhile."""
        if self._progress.steps == self._progress.round_index == 0:
            self._model.begin_at_live()

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore what :meth:`state_dict` returned on *all* ranks, in rank order.

        On as many ranks as then, in the same nodes, each loads its own.  Otherwise all begin at the
        model that they shared, with the local moments of one of those ranks, and on another number
        of ranks the server keeps the hyperparameters that it was made with here.  What ranks had
        done since the last exchange joins what they had not sent, where that is in float32; else
        each rank begins with the mean of it.  The mean over ranks still has to receive the same as
        before.

        Raises:
            ValueError: if states are missing, out of order or of different steps; where ranks
                played clients, unless each goes on with its own.
        """
        check_complete(states)
        transport = self.exchange.transport
        if self.exchange.continues(states):
            self.load_state_dict(dict(states[transport.rank]))
            return
        if any(state["rounds"]["private"]["clients"] for state in states):
            raise ValueError(
                f"{type(self).__name__}: what {len(states)} ranks saved of their clients cannot go "
                f"on with {transport.world_size}, or in other nodes: save the model, and begin the "
                "rounds anew"
            )
        self._is_merging = True
        try:
            self.load_state_dict(dict(states[transport.rank % len(states)]))
        finally:
            self._is_merging = False
        private = states[0]["rounds"]["private"]
        with torch.no_grad():
            self._model.shrink(range(len(self._parameters)), self._decayed_since(private))
            with self._model.hidden():
                self._model.restore()
            self._model.note()
        merged = [self._with_progress(state) for state in states]
        self.exchange.load_state_dicts([state for state, _ in merged])
        is_ahead = self._begin_with_mean([rest for _, rest in merged])
        progress = self._progress
        # Only whether that is now matters: what is ahead is still to be exchanged.
        progress.exchanged_at = [self.steps - is_ahead] * len(progress.exchanged_at)
        progress.decay[:] = 1.0
        progress.loaded_from = None

    @torch.no_grad()
    def _begin_with_mean(self, done: Sequence[Mapping[str, torch.Tensor]]) -> bool:
        """Let every rank have done the mean of what ranks had; return whether that is anything."""
        found = {name for of_one in done for name in of_one}
        with self._model.hidden():
            for name, parameter in zip(self._names, self._parameters, strict=True):
                if name in found:
                    total = torch.stack([each[name] for each in done if name in each]).sum(dim=0)
                    parameter.sub_((total / len(done)).view(parameter.shape).to(parameter))
        self._model.note()
        return bool(found)

    def _decayed_since(self, private: Mapping[str, Any]) -> list[float]:
        """Return for each parameter how much it has decayed since its exchange before a save."""
        return [private["decay"][name] for name in self._names]

    def _with_progress(self, state: Mapping[str, Any]) -> tuple[Mapping[str, Any], Tensors]:
        """Return what a rank saved, with what it had done in what it had not sent.

        And what it had done of parameters of which that is not remembered, not in full, or of some
        of their elements only; by name, (numel,), float32.
        """
        released, private = (state["rounds"][key] for key in ("released", "private"))
        memory, rest = dict(state.get("memory", {})), {}
        has_whole_rows = state.get("ranks_per_node") in (None, 1)
        factors = dict(zip(self._names, self._decayed_since(private), strict=True))
        for name, own in private["own"].items():
            start = private["starts"].get(name, released["model"][name])
            done = (factors[name] * start - own).flatten().float().cpu()
            row = memory.get(name)
            if has_whole_rows and row is not None and row.dtype == done.dtype:
                memory[name] = row + done
            else:
                rest[name] = done
        if "memory" in state:
            state = seal_own({**state, "memory": memory})
        return state, rest

    def release_state_dict(self) -> dict[str, Any]:
        """Return what rounds of private clients may show to anybody: what their guarantee covers.

        That is the server's ``model`` by name, the ``server``'s state and the ``round_index``.
        Residuals, clients' inner states and how many steps were taken are not in it, nor what only
        this rank has.  To go on with the run, save :meth:`state_dict` in a place that is private.
        """
        shared = (value.clone() for value in self._model.values)
        return {
            "model": dict(zip(self._names, shared, strict=True)),
            # A copy, like all the rest: the state is that of this moment.
            "server": copy.deepcopy(self.server.state_dict()),
            "round_index": self.round_index,
        }

    def _require_no_round(self, call: str) -> None:
        """Raise ``ValueError`` while clients play: what they have done by now is no state."""
        if self._is_round_open:
            raise ValueError(
                f"{type(self).__name__}: {call} in the middle of a round of clients: let the loop "
                "over clients() end, or leave it"
            )

    def _state_to_save(self) -> dict[str, Any]:
        self._require_no_round("state_dict()")
        shared = self._model.values
        own, starts = (
            {
                name: tensor.clone()
                for name, tensor, value in zip(self._names, tensors, shared, strict=True)
                if not torch.equal(tensor, value)
            }
            for tensors in (self._model.own, self._model.starts)
        )
        inner = copy.deepcopy(self.inner.state_dict())
        return {
            **self.exchange.state_dict(),
            **inner,
            "rounds": sealed(
                {
                    "released": self.release_state_dict(),
                    "private": {
                        "inner": sealed(inner)[SEAL],
                        "steps": self.steps,
                        "exchanged_at": list(self._progress.exchanged_at),
                        "decay": dict(zip(self._names, self._progress.decay.tolist(), strict=True)),
                        "own": own,
                        "starts": starts,
                        "clients": self._clients.state_dict(),
                    },
                }
            ),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self._require_no_round("load_state_dict()")
        rounds, transport = state.get("rounds"), self.exchange.transport
        if not isinstance(rounds, Mapping):
            raise ValueError(
                f"{type(self).__name__}: the state is not one of rounds: load what their "
                "state_dict() returned"
            )
        require_seal(rounds)
        check_whole(state)
        released, private = rounds["released"], rounds["private"]
        inner = {key: state[key] for key in self.inner.state_dict() if key in state}
        require_seal({**inner, SEAL: private["inner"]})
        shapes = {n: tuple(s.shape) for n, s in zip(self._names, self._model.values, strict=True)}
        saved = {name: tuple(tensor.shape) for name, tensor in released["model"].items()}
        if saved != shapes:
            name = next(n for n in (*saved, *shapes) if saved.get(n) != shapes.get(n))
            raise ValueError(
                f"{type(self).__name__}: the state has other parameters than this model: it was "
                f"saved with {len(saved)}, here are {len(shapes)}, and all names and shapes must "
                f"be the same; {name!r} was {saved.get(name, 'absent')}, and is "
                f"{shapes.get(name, 'absent')}"
            )
        here: dict[str, int | None] = {
            "rank": transport.rank,
            "world_size": transport.world_size,
            "ranks_per_node": self.exchange.ranks_per_node,
        }
        server = released["server"]
        if state["world_size"] != transport.world_size:
            # The server's step belongs to a number of ranks: this run's, not that one's.
            own_groups = self.server.state_dict()["param_groups"]
            server = {**server, "param_groups": own_groups}
        loaded_from = None
        if self._is_merging or any(state.get(key) != value for key, value in here.items()):
            # What only the rank that saved it may go on with, lest it be counted twice.
            loaded_from = state["rank"]
            private = {**private, "own": {}, "starts": {}, "clients": {}}
            keys = {"memory", "server_memory"} & state.keys()
            remembered: dict[str, Any] = {key: {} for key in keys}
            others = {key: value for key, value in state.items() if key not in here}
            known = {key: value for key, value in here.items() if value is not None}
            state = seal_own({**others, **remembered, **known})
        self.exchange.load_state_dict(state)
        self._clients.load_state_dict(private["clients"])
        # Torch's optimizers go on with the tensors that they are given.
        self.inner.load_state_dict(copy.deepcopy(inner))
        self.server.load_state_dict(copy.deepcopy(dict(server)))
        values = [released["model"][name] for name in self._names]
        with self._model.hidden(), torch.no_grad():
            self._model.load(values)
            if private["starts"]:
                own = dict(zip(self._names, values, strict=True)) | private["starts"]
                self._model.begin_at([own[name] for name in self._names])
            for name, parameter in zip(self._names, self._parameters, strict=True):
                if name in private["own"]:
                    parameter.copy_(private["own"][name])
        self._model.note()
        progress = self._progress
        progress.steps = private["steps"]
        progress.round_index = released["round_index"]
        if len(private["exchanged_at"]) == len(progress.exchanged_at):
            progress.exchanged_at = list(private["exchanged_at"])
            progress.decay[:] = self._decayed_since(private)
        else:  # on another number of ranks the model may be in other fragments
            progress.exchanged_at = [progress.steps] * len(progress.exchanged_at)
            progress.decay[:] = 1.0
        progress.loaded_from = loaded_from
        progress.resumed = True

    def _tell_what_was_loaded(self) -> None:
        """Warn, once, of what is lost of what was loaded before this step."""
        resumed, self._progress.resumed = self._progress.resumed, False
        if resumed and self.is_written_to:
            warn_program(
                f"{type(self).__name__}: parameters were written to after load_state_dict() of the "
                "rounds, which had put there what this rank had done since the last exchange: load "
                "or broadcast the model first, and the state of the rounds after it",
            )
        # By now it would have been restored from this rank's own file.
        other, self._progress.loaded_from = self._progress.loaded_from, None
        if other is not None:
            warn_program(
                f"{type(self).__name__}: this rank goes on from the state that rank {other} saved, "
                "without a residual and without what it had not exchanged itself: let every rank "
                "save_rank_file(rounds, folder) with the checkpoint, and load_rank_files(rounds, "
                "folder) when that is loaded",
            )
