"""SAFL, FedAvg, Fed-AMS, FED-LAMB, DiLoCo, MuLoCo and SparseLoCo against NumPy references."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks import (
    SRHT,
    CountSketch,
    ErrorFeedback,
    Exchange,
    GaussianSketch,
    Identity,
    Sign,
    TopK,
)
from comm_hooks.collectives import Simulated
from comm_hooks.compressors import Compressor
from comm_hooks.optim.rounds import (
    SAFL,
    DiLoCo,
    FedAMS,
    FedAvg,
    FedLAMB,
    LocalRounds,
    MuLoCo,
    Participation,
    SparseLoCo,
)
from comm_hooks.optim.rounds.algorithms import LocalAdamW
from tests.optim.references import check
from tests.optim.rounds.problem import (
    SHAPES,
    Arrays,
    gradient,
    largest,
    make_parameters,
    set_gradients,
    start,
    values,
)
from tests.optim.scenarios import RanksOf, rarely

ROUNDS, K = 8, 3
BETAS, EPS, DECAY, LR = (0.9, 0.99), 1e-6, 0.05, 0.02


def train(kind: type[LocalRounds], exchange: dict[str, Any], options: dict[str, Any]) -> Arrays:
    parameters = make_parameters()
    rounds = kind(  # type: ignore[call-arg]
        parameters.items(),  # type: ignore[arg-type]
        Exchange(
            **{"min_numel": 16, "collective": "all_gather", **exchange},
            memory=ErrorFeedback(decay=0.95) if kind is SparseLoCo else None,
        ),
        local_steps=K,
        **options,
    )
    for step in range(ROUNDS * K):
        set_gradients(parameters, step, dist.get_rank())
        rounds.step()
    return values(parameters)


def average_rounds(
    ranks: int,
    local: Callable[[int, str, int, np.ndarray], np.ndarray],
    combine: Callable[[str, np.ndarray, list[np.ndarray]], np.ndarray],
) -> Arrays:
    """Rounds in which ``local`` makes a step of a client's model and ``combine`` ends the round."""
    shared = start()
    for index in range(ROUNDS):
        models = [dict(shared) for _ in range(ranks)]
        for rank, model in enumerate(models):
            for k in range(K):
                for name in SHAPES:
                    model[name] = local(rank, name, index * K + k, model[name])
        shared = {n: combine(n, shared[n], [m[n] for m in models]) for n in SHAPES}
    return shared


def sketch_of(compressor: Compressor, vector: np.ndarray, index: int) -> np.ndarray:
    """R^T R v for the R of a round, in float32: sketches are tested on their own."""
    tensors = {"weight": torch.from_numpy(vector).float()}
    exchange = Exchange(compressor, min_numel=16)
    exchange.step = index
    exchange.average_(tensors)
    return tensors["weight"].double().numpy()


@pytest.mark.parametrize("amsgrad", [True, *rarely(False)])
@pytest.mark.parametrize(
    "sketch",
    [CountSketch(0.25), *rarely(SRHT(0.25), GaussianSketch(0.25), Identity())],
    ids=lambda s: type(s).__name__,
)
@pytest.mark.filterwarnings("ignore:world size is 1")
def test_safl(ranks_of: RanksOf, sketch: Compressor, amsgrad: bool) -> None:
    options = {
        "lr": 0.02,
        "local_lr": 0.1,
        "betas": BETAS,
        "eps": EPS,
        "amsgrad": amsgrad,
    }
    replicas = ranks_of(2).run(
        train, SAFL, {"compressor": sketch, "collective": "all_reduce"}, options
    )
    m, v, v_hat = ({n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(3))
    index = dict.fromkeys(SHAPES, 0)

    def local(rank: int, name: str, step: int, x: np.ndarray) -> np.ndarray:
        return x - 0.1 * gradient(name, step, rank, x)

    def combine(name: str, x: np.ndarray, models: list[np.ndarray]) -> np.ndarray:
        u = x - np.mean(models, axis=0)
        if name == "weight":
            u = ranks_of(1).run(sketch_of, sketch, u, index[name])[0]
        index[name] += 1
        m[name] = BETAS[0] * m[name] + (1 - BETAS[0]) * u
        v[name] = BETAS[1] * v[name] + (1 - BETAS[1]) * u**2
        v_hat[name] = np.maximum(v_hat[name], v[name]) if amsgrad else v[name]
        return x - 0.02 * m[name] / (np.sqrt(v_hat[name]) + EPS)

    # Adam's steps have the size of the learning rate however small the gradient: where the float32
    # of a sketch hits a coordinate that is nearly zero, an error of 1e-6 is 1e-4 of a step.
    check(replicas, average_rounds(2, local, combine), atol=5e-4)


def test_fed_avg(ranks_of: RanksOf) -> None:
    options = {"lr": 0.1, "server_lr": 0.7, "server_momentum": 0.5}
    replicas = ranks_of(3).run(train, FedAvg, {"compressor": Identity()}, options)
    momentum = {n: np.zeros(s) for n, s in SHAPES.items()}

    def combine(name: str, x: np.ndarray, models: list[np.ndarray]) -> np.ndarray:
        momentum[name] = 0.5 * momentum[name] + x - np.mean(models, axis=0)
        return x - 0.7 * momentum[name]

    check(
        replicas,
        average_rounds(3, lambda r, n, s, x: x - 0.1 * gradient(n, s, r, x), combine),
        atol=3e-5,
    )


class Moments:
    """Algorithm 2 of FED-LAMB, line by line, for a few clients; without line 13, Fed-AMS."""

    def __init__(
        self,
        clients: int,
        layerwise: Callable[[float], float] | None,
        *,
        corrected: bool = True,
        bound: str = "server",
    ) -> None:
        self.layerwise, self.corrected, self.bound = layerwise, corrected, bound
        self.v_hat = {n: np.full(s, EPS) for n, s in SHAPES.items()}
        self.m = [{n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(clients)]
        self.v = [{n: np.full(s, EPS) for n, s in SHAPES.items()} for _ in range(clients)]
        self.t = [dict.fromkeys(SHAPES, 0) for _ in range(clients)]

    def line_11(self, client: int, name: str) -> np.ndarray:
        v, t = self.v[client][name], self.t[client][name]
        return v / (1 - BETAS[1] ** t) if self.corrected else v

    def local(self, client: int, name: str, step: int, x: np.ndarray) -> np.ndarray:
        g = gradient(name, step, client, x)
        m, v, t = self.m[client], self.v[client], self.t[client]
        t[name] += 1
        m[name] = BETAS[0] * m[name] + (1 - BETAS[0]) * g
        m_hat = m[name] / (1 - BETAS[0] ** t[name]) if self.corrected else m[name]
        v[name] = BETAS[1] * v[name] + (1 - BETAS[1]) * g**2
        root = self.v_hat[name]
        if self.bound == "client":
            root = np.maximum(root, self.line_11(client, name))
        p = m_hat / np.sqrt(root + EPS) + DECAY * x
        if self.layerwise is None:
            return x - LR * p
        return x - LR * self.layerwise(float(np.linalg.norm(x))) * p / np.linalg.norm(p)

    def end(self, name: str, clients: list[int]) -> None:
        mean = np.mean([self.line_11(c, name) for c in clients], axis=0)
        self.v_hat[name] = np.maximum(self.v_hat[name], mean)


def clamp(norms: torch.Tensor) -> torch.Tensor:
    return norms.clamp(0.5, 5.0)


CLIENT = {"bound": "client"}


@pytest.mark.parametrize(
    ("kind", "options", "layerwise"),
    [
        (FedAMS, {}, None),
        (FedAMS, {"bias_correction": True, **CLIENT}, None),
        (FedLAMB, {"phi": clamp}, lambda norm: min(max(norm, 0.5), 5.0)),
        *rarely(
            (FedAMS, {"bias_correction": True}, None),
            (FedAMS, CLIENT, None),
            (FedLAMB, {}, lambda norm: norm),
            (FedLAMB, CLIENT, lambda norm: norm),
        ),
    ],
    ids=["ams", "ams-ours", "lamb-clamped", "ams-corrected", "ams-client", "lamb", "lamb-client"],
)
def test_fed_ams_and_fed_lamb(
    ranks_of: RanksOf,
    kind: type[LocalRounds],
    options: dict[str, Any],
    layerwise: Callable[[float], float] | None,
) -> None:
    common = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, **options}
    replicas = ranks_of(2).run(train, kind, {"compressor": Identity()}, common)
    moments = Moments(
        2,
        layerwise,
        corrected=options.get("bias_correction", kind is FedLAMB),
        bound=options.get("bound", "server"),
    )

    def combine(name: str, x: np.ndarray, models: list[np.ndarray]) -> np.ndarray:
        moments.end(name, [0, 1])
        return np.mean(models, axis=0)

    expected = average_rounds(2, moments.local, combine)
    # Fed-AMS divides by the root of 2 eps alone in the first round, which carries it far away.
    size = max(1.0, float(np.abs(expected["weight"]).max()) / 10)
    check(replicas, expected, atol=3e-5 * size)


PARTICIPATION = Participation(clients=5, fraction=0.6, seed=2)


def train_clients() -> Arrays:
    parameters = make_parameters()
    rounds = FedLAMB(
        parameters.items(),
        Exchange(Identity(), min_numel=16),
        lr=0.02,
        betas=BETAS,
        eps=EPS,
        weight_decay=DECAY,
        participation=PARTICIPATION,
    )
    for index in range(ROUNDS):
        for client in rounds.clients():
            for k in range(K):
                set_gradients(parameters, index * K + k, client)
                rounds.step()
    return values(parameters)


def test_fed_lamb_with_more_clients_than_ranks(ranks_of: RanksOf) -> None:
    moments = Moments(5, lambda norm: norm)
    shared = start()
    for index in range(ROUNDS):
        drawn = PARTICIPATION.draw(index)
        models = []
        for client in drawn:
            model = dict(shared)
            for k in range(K):
                for name in SHAPES:
                    model[name] = moments.local(client, name, index * K + k, model[name])
            models.append(model)
        for name in SHAPES:
            moments.end(name, drawn)
        shared = {n: np.mean([m[n] for m in models], axis=0) for n in SHAPES}
    check(ranks_of(2).run(train_clients), shared, atol=3e-5)


class AdamW:
    """The inner optimizer of the language-model recipes."""

    def __init__(self, clients: int) -> None:
        self.m = [{n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(clients)]
        self.v = [{n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(clients)]

    def local(self, client: int, name: str, step: int, x: np.ndarray) -> np.ndarray:
        g = gradient(name, step, client, x)
        m, v = self.m[client], self.v[client]
        m[name] = BETAS[0] * m[name] + (1 - BETAS[0]) * g
        v[name] = BETAS[1] * v[name] + (1 - BETAS[1]) * g**2
        root = np.sqrt(v[name] / (1 - BETAS[1] ** (step + 1)))
        x = x * (1 - 0.02 * DECAY)
        return x - 0.02 * m[name] / (1 - BETAS[0] ** (step + 1)) / (root + EPS)


ADAMW = {"lr": 0.02, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}


def test_diloco(ranks_of: RanksOf) -> None:
    replicas = ranks_of(2).run(train, DiLoCo, {"compressor": Identity()}, ADAMW)
    inner = AdamW(2)
    momentum = {n: np.zeros(s) for n, s in SHAPES.items()}

    def combine(name: str, x: np.ndarray, models: list[np.ndarray]) -> np.ndarray:
        delta = x - np.mean(models, axis=0)
        momentum[name] = 0.9 * momentum[name] + delta
        return x - 0.7 * (delta + 0.9 * momentum[name])

    check(replicas, average_rounds(2, inner.local, combine), atol=3e-5)


class MuonAdamW(AdamW):
    """Muon for the matrix, AdamW for the rest."""

    def __init__(self, clients: int) -> None:
        super().__init__(clients)
        self.momenta = [np.zeros(SHAPES["weight"]) for _ in range(clients)]

    def local(self, client: int, name: str, step: int, x: np.ndarray) -> np.ndarray:
        if name != "weight":
            return super().local(client, name, step, x)
        g = gradient(name, step, client, x)
        momentum = self.momenta[client] = 0.95 * self.momenta[client] + 0.05 * g
        wide = 0.95 * momentum + 0.05 * g
        o = wide / np.linalg.norm(wide)
        for _ in range(5):  # singular values s become 3.4445 s - 4.775 s^3 + 2.0315 s^5
            o = 3.4445 * o - 4.775 * o @ o.T @ o + 2.0315 * o @ o.T @ o @ o.T @ o
        return (1 - 0.02 * DECAY) * x - 0.02 * 0.2 * max(x.shape) ** 0.5 * o


def test_mu_lo_co(ranks_of: RanksOf) -> None:
    replicas = ranks_of(2).run(train, MuLoCo, {"compressor": Identity()}, ADAMW)
    inner = MuonAdamW(2)
    momentum = {n: np.zeros(s) for n, s in SHAPES.items()}

    def combine(name: str, x: np.ndarray, models: list[np.ndarray]) -> np.ndarray:
        delta = x - np.mean(models, axis=0)
        momentum[name] = 0.6 * momentum[name] + delta
        return x - 0.7 * (delta + 0.6 * momentum[name])

    check(replicas, average_rounds(2, inner.local, combine), atol=3e-5)


def test_sparse_loco(ranks_of: RanksOf) -> None:
    exchange = {"compressor": TopK(density=0.05, value_bits=32)}
    replicas = ranks_of(2).run(train, SparseLoCo, exchange, {**ADAMW, "outer_lr": 0.9})
    inner = AdamW(2)
    residuals = [np.zeros(SHAPES["weight"]) for _ in range(2)]

    def combine(name: str, x: np.ndarray, models: list[np.ndarray]) -> np.ndarray:
        sent = []
        for rank, model in enumerate(models):
            delta = x - model
            if name == "weight":
                delta = delta + 0.95 * residuals[rank]
                residuals[rank] = delta - largest(delta)
                delta = largest(delta)
            sent.append(delta)
        return x - 0.9 * np.mean(sent, axis=0)

    check(replicas, average_rounds(2, inner.local, combine), atol=3e-5)


def state_of(phi: Callable[[torch.Tensor], torch.Tensor] | None = None) -> bool:
    """FED-LAMB's v_hat comes back with the rest."""

    def make() -> tuple[Any, FedLAMB]:
        parameters = make_parameters()
        return parameters, FedLAMB(
            parameters.items(), Exchange(Identity(), min_numel=16), lr=0.1, local_steps=2
        )

    def run(parameters: Any, rounds: FedLAMB, steps: range) -> None:
        for step in steps:
            set_gradients(parameters, step, dist.get_rank())
            rounds.step()

    parameters, rounds = make()
    run(parameters, rounds, range(4))
    state, model = copy.deepcopy(rounds.state_dict()), values(parameters)
    run(parameters, rounds, range(4, 8))
    again, resumed = make()
    with torch.no_grad():
        for name, p in again.items():
            p.copy_(torch.from_numpy(model[name]))
    resumed.load_state_dict(state)
    run(again, resumed, range(4, 8))
    return all(np.array_equal(x, values(parameters)[n]) for n, x in values(again).items())


def test_fed_lamb_resumes(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(state_of) == [True, True]


def zero_layer() -> bool:
    """A bias that starts at zero moves, though phi(0) = 0."""
    bias = torch.nn.Parameter(torch.zeros(3))
    rounds = FedLAMB([bias], Exchange(Identity()), lr=0.1, local_steps=1)
    bias.grad = torch.ones(3)
    rounds.step()
    return bool((bias < 0).all())


def test_a_layer_of_norm_zero_moves(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(zero_layer) == [True, True]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda p: FedLAMB(p, Exchange(Identity()), local_steps=1, phi=lambda n: n - 100),
            "phi must be positive",
        ),
        (
            lambda p: FedLAMB(p, Exchange(Identity()), local_steps=1, phi=torch.zeros_like),
            "phi must be positive",
        ),
        (lambda p: FedLAMB(p, Exchange(Identity()), local_steps=1, lr=-1.0), "lr must lie in"),
        (lambda p: FedAMS(p, Exchange(Identity()), local_steps=1, eps=0.0), "eps must be positive"),
        (
            lambda p: FedAMS(p, Exchange(Identity()), local_steps=1, bound="all"),
            "FedAMS: bound must be one of server, client, got 'all'",
        ),
        (lambda p: SAFL(p, Exchange(Sign()), local_steps=1), "is no sketch"),
        (lambda p: SAFL(p, Exchange(CountSketch()), local_steps=0), "local_steps must be"),
        (
            lambda p: SparseLoCo(p, Exchange(TopK(), ErrorFeedback()), local_steps=1),
            r"memory must be ErrorFeedback\(decay=0.95\)",
        ),
    ],
)
def test_bad_settings_are_refused(build: Callable[[Any], LocalRounds], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(make_parameters().items())


def test_v_hat_follows_a_model_that_is_moved() -> None:
    """Frameworks move it after its optimizer was made; "meta" stands for an accelerator."""
    model = nn.Linear(4, 4)
    exchange = Exchange(Identity(), transport=Simulated(1)[0])
    rounds = FedAMS(model.named_parameters(), exchange, local_steps=2)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to("meta")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    model(torch.ones(2, 4, device="meta")).sum().backward()
    rounds.step()
    assert {p.device.type for p in rounds.parameters} == {"meta"}
    statistics = rounds.inner.statistics()  # type: ignore[attr-defined]
    rounds.inner.set_statistics(statistics)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FedAvg, {}),
        (DiLoCo, {}),
        (SparseLoCo, {"memory": ErrorFeedback(decay=0.95)}),
        (LocalAdamW, {}),
        (SAFL, {"compressor": CountSketch(ratio=0.5)}),
    ],
)
def test_a_groups_settings_are_those_of_one_optimizer(kind: Any, options: dict[str, Any]) -> None:
    parameters = list(make_parameters().items())
    groups: list[dict[str, Any]] = [
        {"params": iter(parameters[:1]), "lr": 0.5, "weight_decay": 0.25},
        {"params": parameters[1:]},
    ]
    exchange = Exchange(**{"compressor": Identity(), **options}, transport=Simulated(1)[0])
    rounds = kind(groups, exchange, local_steps=2)
    own, other = (rounds.server, rounds) if kind is SAFL else (rounds, rounds.server)
    assert [group["lr"] == 0.5 for group in own.param_groups] == [True, False]
    for name in ("lr", "weight_decay"):
        assert len({group[name] for group in other.param_groups}) == 1
    assert "lr" in groups[0]
