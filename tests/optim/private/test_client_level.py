"""Rounds in which clients are protected as a whole."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from comm_hooks import SRHT, CountSketch, ErrorFeedback, Exchange, Quantize, RandomK, Sign, TopK
from comm_hooks.collectives import Simulated, Transport, run_ranks
from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.identity import Identity
from comm_hooks.optim import SAFL, FedAMS, FedAvg, FedLAMB, LocalRounds, Participation
from comm_hooks.optim.private import AdaS, PrivacyEngine, PrivacyError, PrivateParticipation
from comm_hooks.optim.private.accounting import GaussianEvent, RDPAccountant
from comm_hooks.optim.private.client_level import _ClientGuard
from tests.optim.private.saving import equal, saved
from tests.optim.scenarios import rarely

CLIENTS = 12
COMPRESSORS = [
    (Identity(), False),
    (TopK(density=1 / 8), True),
    (CountSketch(ratio=0.25), False),
    (RandomK(density=0.25, unbiased=False), True),
    *rarely((Sign(), True), (Quantize(bits=4), False), (SRHT(ratio=0.25), False)),
]


def participation(**settings: Any) -> PrivateParticipation:
    return PrivateParticipation(
        **{
            "clients": CLIENTS,
            "sample_rate": 1.0,
            "noise_multiplier": 1e-9,
            "max_norm": 1e3,
            **settings,
        }
    )


def small_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(40, 50)


def exchange(compressor: Compressor, memory: bool = False) -> Exchange:
    return Exchange(
        compressor, ErrorFeedback() if memory else None, min_numel=64, transport=Simulated(1)[0]
    )


def play(rounds: LocalRounds, model: nn.Module, size: float = 1.0, number: int = 1) -> list[int]:
    """Each client pulls the weights towards a place of its own."""
    played = []
    for _ in range(number):
        for client in rounds.clients():
            played.append(client)
            generator = torch.Generator().manual_seed(client)
            target = torch.randn(50, 40, generator=generator) * size
            loss = 0.5 * (model.weight - target).square().sum()  # type: ignore[union-attr,operator]
            loss = loss + 0.5 * (model.bias - client).square().sum()  # type: ignore[operator]
            loss.backward()
            rounds.step()
            rounds.zero_grad()
    return played


def moved(model: nn.Module) -> torch.Tensor:
    start = small_model()
    return torch.cat(
        [
            (p - q).flatten().detach()
            for p, q in zip(model.parameters(), start.parameters(), strict=True)
        ]
    )


@pytest.mark.parametrize(("compressor", "memory"), COMPRESSORS, ids=str)
def test_without_noise_and_clipping_it_is_the_ordinary_round(
    compressor: Compressor, memory: bool
) -> None:
    results = []
    for chosen in (Participation(clients=CLIENTS), participation()):
        model = small_model()
        rounds = FedAvg(
            model.named_parameters(), exchange(compressor, memory), lr=0.1, participation=chosen
        )
        play(rounds, model)
        results.append(moved(model))
    if compressor.linear and not memory and compressor != Identity():
        # The ordinary round sketches the sum once; here every client is sketched, by one map.
        torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-4)
    elif compressor == RandomK(density=0.25, unbiased=False):
        # There every turn has a mask of its own, here a round has one.
        assert results[1].count_nonzero() < results[0].count_nonzero()
    else:
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("compressor", "memory"), COMPRESSORS, ids=str)
def test_one_client_changes_a_sum_by_at_most_c(
    compressor: Compressor, memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its delta is, whatever the compressor makes of it, and in later rounds too."""
    limit, rounds_played = 0.5, 3
    norms: list[float] = []
    clip = _ClientGuard.clip_

    def note(self: Any, message: Any) -> None:
        clip(self, message)
        norms.append(float(torch.cat([m.flatten() for m in message]).double().norm()))

    monkeypatch.setattr(_ClientGuard, "clip_", note)
    model = small_model()
    rounds = FedAvg(
        model.named_parameters(),
        exchange(compressor, memory),
        lr=0.9,
        participation=participation(max_norm=limit),
    )
    play(rounds, model, size=100.0, number=rounds_played)
    assert len(norms) == rounds_played * CLIENTS
    assert max(norms) <= limit
    # What was sent is what the server receives: nothing goes past the clipping.
    bound = limit * rounds_played * _decoded_bound(compressor)
    assert float(moved(model).norm()) <= bound + 1e-2


def _decoded_bound(compressor: Compressor) -> float:
    """How much longer than its payload a decompressed vector may be."""
    return compressor.norm_bound(2000) if compressor.linear else 1.0


@pytest.mark.parametrize(
    ("compressor", "rate", "tolerance"),
    [
        # Of 80,000 draws the relative standard deviation of the variance is 0.5 %.
        (Identity(), 0.5, 0.03),
        *rarely((TopK(density=1 / 8), 0.5, 0.03)),
        # An element reads one noised payload element: 500 per round, each read four times.
        (CountSketch(ratio=0.25), 1.0, 0.06),
    ],
    ids=str,
)
def test_the_variance_is_the_one_that_was_told(
    compressor: Compressor, rate: float, tolerance: float
) -> None:
    squares, count, model = 0.0, 0, small_model()
    chosen = participation(clients=3, sample_rate=rate, noise_multiplier=2.0, max_norm=0.3)
    rounds = FedAvg(model.named_parameters(), exchange(compressor), lr=0.1, participation=chosen)
    previous = model.weight.detach().clone()
    for _ in range(40):
        for _ in rounds.clients():
            pass  # no client does anything: only noise moves the model
        now = model.weight.detach().clone()
        squares += float((now - previous).double().square().sum())
        count += now.numel()
        previous = now
    assert squares / count == pytest.approx((0.6 / (rate * 3)) ** 2, rel=tolerance)


def test_clients_are_drawn_by_poisson_sampling_and_never_alike() -> None:
    transport = Simulated(1)[0]
    draws = []
    for _ in range(2):
        torch.manual_seed(1)
        chosen = participation(clients=2000, sample_rate=0.3)
        for index in range(3):
            turns = chosen.turns(index, transport)
            draws.append({client for turn in turns for client in turn if client is not None})
    for i, drawn in enumerate(draws):
        assert 600 - 6 * 20.5 < len(drawn) < 600 + 6 * 20.5
        for other in draws[:i]:
            assert 180 - 6 * 12.8 < len(drawn & other) < 180 + 6 * 12.8


def test_a_round_has_one_map_and_the_next_another() -> None:
    touched = []
    for number in (1, 8):
        model = small_model()
        rounds = FedAvg(
            model.named_parameters(),
            exchange(RandomK(density=0.25, unbiased=False)),
            lr=0.1,
            participation=participation(),
        )
        play(rounds, model, number=number)
        touched.append(int(moved(model)[: 50 * 40].count_nonzero()) / (50 * 40))
    assert touched[0] == 0.25
    assert touched[1] > 0.8  # 1 - 0.75^8 = 0.9


def test_a_round_without_clients_is_a_round_of_noise() -> None:
    entered = []
    model = small_model()
    chosen = participation(
        sample_rate=1e-9, noise_multiplier=1.0, max_norm=1.0, enter=lambda: entered.append(1)
    )
    rounds = FedAvg(
        model.named_parameters(), exchange(TopK(density=0.1), True), lr=0.1, participation=chosen
    )
    assert play(rounds, model, number=2) == []
    assert len(entered) == 2
    assert bool((moved(model) != 0).all())


KINDS: dict[str, Callable[[nn.Module, Exchange, PrivateParticipation], LocalRounds]] = {
    "safl": lambda m, e, p: SAFL(m.named_parameters(), e, lr=0.02, local_lr=0.1, participation=p),
    "fed_avg": lambda m, e, p: FedAvg(m.named_parameters(), e, lr=0.1, participation=p),
    "outer_momentum": lambda m, e, p: LocalRounds(
        torch.optim.AdamW(m.named_parameters(), lr=0.01),
        e,
        torch.optim.SGD(m.parameters(), lr=0.7, momentum=0.9, nesterov=True),
        participation=p,
    ),
    "fed_ada_dps": lambda m, e, p: LocalRounds(
        AdaS(
            m.named_parameters(),
            lr=0.02,
            side_information={n: torch.full_like(q, 0.5) for n, q in m.named_parameters()},
        ),
        e,
        participation=p,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_rounds_that_can_be_private(kind: str) -> None:
    engine = PrivacyEngine()
    chosen = engine.private_participation(
        clients=CLIENTS, sample_rate=0.5, noise_multiplier=0.2, max_norm=0.3
    )
    model = small_model()
    compressor = CountSketch(ratio=0.5) if kind == "safl" else TopK(density=1 / 4)
    rounds = KINDS[kind](model, exchange(compressor, kind != "safl"), chosen)
    played = play(rounds, model, number=8)
    assert set(played) <= set(range(CLIENTS))
    assert moved(model).isfinite().all()
    assert engine.get_epsilon(1e-2) == RDPAccountant().epsilon(
        [GaussianEvent(0.2, 0.5, steps=8)], 1e-2
    )


CHANGES = {
    "clients": 2 * CLIENTS,
    "sample_rate": 0.5,
    "noise_multiplier": 1e-6,
    "max_norm": 9.0,
    "enter": lambda: None,
    "join": lambda transport: None,
    "releases": None,
}


def test_settings_out_of_range_and_settings_that_the_ledger_counts_on() -> None:
    for setting, value in [("clients", 0), ("sample_rate", 0.0), ("sample_rate", 1.1)] + [
        (name, 0.0) for name in ("noise_multiplier", "max_norm")
    ]:
        with pytest.raises(ValueError, match=setting):
            participation(**{setting: value})
    chosen = PrivacyEngine().private_participation(
        clients=CLIENTS, sample_rate=1.0, noise_multiplier=1.0, max_norm=1.0
    )
    for name, value in CHANGES.items():
        with pytest.raises(PrivacyError, match=f"PrivateParticipation.{name} is settled"):
            setattr(chosen, name, value)
    rounds = FedAvg(small_model().named_parameters(), exchange(Identity()), participation=chosen)
    with pytest.raises(AttributeError, match="participation"):
        rounds.participation = Participation(clients=CLIENTS)  # type: ignore[misc]


@pytest.mark.parametrize("kind", [FedAMS, FedLAMB])
def test_a_bound_on_second_moments_is_refused(
    kind: Callable[..., LocalRounds],
) -> None:
    entered: list[int] = []
    chosen = participation(enter=lambda: entered.append(1))
    with pytest.raises(ValueError, match=r"^Fed\w+: PrivateParticipation averages displacements, "):
        kind(small_model().named_parameters(), exchange(Identity()), participation=chosen)
    assert not entered


def on_rank(
    transport: Transport, compressor: Compressor, memory: bool
) -> tuple[torch.Tensor, float, list[int]]:
    torch.manual_seed(5)
    engine = PrivacyEngine()
    chosen = engine.private_participation(
        clients=CLIENTS, sample_rate=0.5, noise_multiplier=0.5, max_norm=1.0
    )
    model = small_model()
    rounds = FedAvg(
        model.named_parameters(),
        Exchange(
            compressor, ErrorFeedback() if memory else None, min_numel=64, transport=transport
        ),
        lr=0.1,
        participation=chosen,
    )
    played = play(rounds, model, number=2)
    return moved(model), engine.get_epsilon(1e-2), played


@pytest.mark.parametrize(
    ("compressor", "memory"), [(TopK(density=1 / 8), True), (CountSketch(ratio=0.25), False)]
)
def test_ranks_agree_on_who_is_drawn_and_on_the_noise(compressor: Compressor, memory: bool) -> None:
    results = run_ranks(lambda transport: on_rank(transport, compressor, memory), 3)
    for rank, (model, epsilon, played) in enumerate(results):
        assert torch.equal(model, results[0][0])
        assert epsilon == results[0][1]
        assert all(client % 3 == rank for client in played)
    everybody = [client for _, _, played in results for client in played]
    assert 0 < len(everybody) < 2 * CLIENTS
    assert float(results[0][0].norm()) > 0


def test_a_budget_ends_the_rounds() -> None:
    engine = PrivacyEngine()
    chosen = engine.private_participation(
        clients=CLIENTS, sample_rate=0.5, noise_multiplier=1.0, max_norm=1.0
    )
    engine.set_budget(2.0, 1e-2)
    model = small_model()
    rounds = FedAvg(model.named_parameters(), exchange(Identity()), lr=0.1, participation=chosen)
    with pytest.raises(PrivacyError, match="is spent"):
        play(rounds, model, number=100)
    assert 1.0 < engine.get_epsilon(1e-2) <= 2.0


HARM = [1e11, 1.5e20, float("inf"), float("nan")]


def with_a_client_that_does_harm(
    transport: Transport, kind: str, value: float | None
) -> tuple[torch.Tensor, int]:
    """Return how far a round of 12 clients moves the model, and how many rounds there were.

    Client 3's gradients are ``value``, in one element of each parameter; None for a client that
    has no data.
    """
    model = small_model()
    linear = kind == "safl"
    compressor = CountSketch(ratio=0.5) if linear else TopK(density=1 / 4)
    memory = None if linear else ErrorFeedback()
    rounds = KINDS[kind](
        model,
        Exchange(compressor, memory, min_numel=64, transport=transport),
        participation(max_norm=0.5),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="round .* left out")
        for client in rounds.clients():
            if client == 3 and value is None:
                continue
            model(torch.ones(1, 40)).square().sum().backward()
            if client == 3:
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                    parameter.grad.view(-1)[0] = value
            rounds.step()
            rounds.zero_grad()
    return moved(model), rounds.round_index


@pytest.mark.parametrize("kind", ["safl", "fed_avg", "outer_momentum"])
def test_a_client_shows_its_presence_by_its_clipped_message_alone(kind: str) -> None:
    ranks = run_ranks(
        lambda transport: [
            with_a_client_that_does_harm(transport, kind, value) for value in [None, *HARM]
        ],
        2,
    )
    absent, _ = ranks[0][0]
    for mine, other in zip(*ranks, strict=True):
        assert mine[0].isfinite().all()
        assert torch.equal(mine[0], other[0])
        assert mine[1] == other[1] == 1
        if kind == "fed_avg":  # whose server adds up what it receives
            assert float((mine[0] - absent).norm()) <= 0.5 / CLIENTS * (1 + 1e-4)


def private_rounds(
    model: nn.Module, client_state: str = "reset", **settings: Any
) -> tuple[LocalRounds, PrivateParticipation]:
    chosen = participation(**{"sample_rate": 0.5, **settings})
    rounds = LocalRounds(
        torch.optim.AdamW(model.named_parameters(), lr=0.01),
        exchange(TopK(density=1 / 8), memory=True),
        torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9),
        participation=chosen,
        client_state=client_state,
    )
    return rounds, chosen


@pytest.mark.parametrize("client_state", ["keep", "reset"])
def test_what_is_saved_says_what_may_be_released(client_state: str) -> None:
    model = small_model()
    rounds, _ = private_rounds(model, client_state)
    played = play(rounds, model, number=2)
    state, released = rounds.state_dict(), rounds.release_state_dict()
    assert not rounds.state, "the last client's moments"
    assert not state["state"]
    assert not state["memory"]
    assert equal(released, state["rounds"]["released"])
    assert released.keys() == {"model", "server", "round_index"}
    assert released["round_index"] == 2
    for name, parameter in model.named_parameters():
        assert torch.equal(released["model"][name], parameter)
    assert state["rounds"]["private"]["steps"] == rounds.steps == len(played)
    assert (state["rounds"]["private"]["clients"] != {}) == bool(played)


def test_rounds_go_on_from_private_rounds_that_the_ledger_has() -> None:
    settings = {"clients": CLIENTS, "sample_rate": 0.5, "noise_multiplier": 1.0, "max_norm": 0.5}
    engine, elsewhere = PrivacyEngine(), PrivacyEngine()

    def rounds_of(sampling: Any, number: int) -> tuple[nn.Module, LocalRounds]:
        model = small_model()
        inner = torch.optim.AdamW(model.named_parameters(), lr=0.01)
        rounds = LocalRounds(
            inner, exchange(TopK(density=1 / 8), memory=True), participation=sampling
        )
        play(rounds, model, number=number)
        return model, rounds

    _, rounds = rounds_of(engine.private_participation(**settings), 3)
    _, plain = rounds_of(Participation(CLIENTS, 0.5), 3)
    model, resumed = rounds_of(elsewhere.private_participation(**settings), 0)
    with pytest.raises(PrivacyError, match="the state was not saved by private training"):
        resumed.load_state_dict(plain.state_dict())
    assert resumed.round_index == 0
    resumed.load_state_dict(saved(rounds.state_dict()))
    with pytest.raises(
        PrivacyError, match=r"3 releases .* placement 'clients', and the ledger has"
    ):
        play(resumed, model)
    with pytest.warns(UserWarning, match="lacks 3 steps"):
        elsewhere.load_state_dict(engine.state_dict())
    play(resumed, model)
    assert resumed.round_index == 4
    assert [e["steps"] for e in resumed.state_dict()["provenance"]["events"]] == [3, 1]


@pytest.mark.parametrize("clients", [1, 4])
def test_the_last_digits_do_not_tell_who_took_part(clients: int) -> None:
    """Mironov (CCS 2012): what is added after the noise leaves float32 sums of its own kind."""
    numel = 200_000
    model = nn.Linear(numel, 1, bias=False)
    nn.init.zeros_(model.weight)
    chosen = participation(clients=clients, noise_multiplier=20.0, max_norm=1.0)
    rounds = LocalRounds(
        torch.optim.SGD(model.named_parameters(), lr=1.0),
        exchange(Identity()),
        participation=chosen,
    )
    sent = 1e-3 * torch.randn(1, numel, generator=torch.Generator().manual_seed(7))
    for client in rounds.clients():
        model.weight.grad = sent.clone() if client == 0 else torch.zeros(1, numel)
        rounds.step()
        rounds.zero_grad()
    total = -model.weight.detach() * clients
    rest = (total.double() - sent.double()).float()
    assert (rest + sent != total).any(), "is what float32 adds up from the message of client 0"


def with_gradients_of_client_0(is_there: bool, before: bool) -> torch.Tensor:
    """Return the sum of a round whose gradients are zeroed before each backward pass, or never."""
    model = small_model()
    rounds = FedAvg(
        model.named_parameters(), exchange(Identity()), participation=participation(max_norm=0.5)
    )
    for client in rounds.clients():
        for _ in range(2 if client or is_there else 0):
            if before:
                rounds.zero_grad(set_to_none=False)
            generator = torch.Generator().manual_seed(client)
            inputs = torch.rand(4, 40, generator=generator)
            model(inputs * (1e-4 if client else 2000.0)).sum().backward()
            rounds.step()
    return CLIENTS * moved(model)


@pytest.mark.parametrize("before", [True, False])
def test_gradients_of_one_client_are_not_another_ones(before: bool) -> None:
    outcomes = [with_gradients_of_client_0(is_there, before) for is_there in (False, True)]
    assert float((outcomes[0] - outcomes[1]).norm()) <= 0.5 * (1 + 1e-4)


def accumulate(rounds: LocalRounds, model: nn.Module) -> None:
    rounds.step()
    model(torch.ones(1, 40)).sum().backward()


def schedule_local_steps(rounds: LocalRounds, model: nn.Module) -> None:
    rounds.step()
    torch.optim.lr_scheduler.StepLR(rounds, 1).step()
    rounds.zero_grad()


def schedule_the_server(rounds: LocalRounds, model: nn.Module) -> None:
    rounds.step()
    rounds.server.param_groups[0]["momentum"] = 0.5
    rounds.zero_grad()


def scale_gradients(rounds: LocalRounds, model: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 40)).sum()).backward()
    scaler.step(rounds)


@pytest.mark.parametrize(
    ("leave", "message"),
    [
        (accumulate, "leaves gradients that no step has used"),
        (schedule_local_steps, r"changed lr from 0\.01 to 0\.001"),
        (schedule_the_server, r"changed momentum from 0\.9 to 0\.5"),
        (scale_gradients, "a GradScaler's scale"),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
def test_what_a_client_would_leave_beside_its_delta_is_refused(
    leave: Callable[[LocalRounds, nn.Module], None], message: str
) -> None:
    model = small_model()
    rounds, _ = private_rounds(model, sample_rate=1.0)

    def work() -> None:
        for client in rounds.clients():
            model(torch.ones(1, 40)).square().sum().backward()
            if client == 5:
                leave(rounds, model)
                continue
            rounds.step()
            rounds.zero_grad()

    with pytest.raises(PrivacyError, match=message):
        work()
    assert all(map(torch.equal, model.parameters(), small_model().parameters()))


class Counting(nn.Module):
    """Keeps the mean of its inputs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(40))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + inputs.mean(0)
        return inputs


@pytest.mark.parametrize(
    ("layer", "buffer"),
    [
        (nn.BatchNorm1d(40), "running_mean"),
        (Counting(), "seen"),
        (nn.Sequential(nn.BatchNorm1d(40)).eval(), None),
        (nn.LayerNorm(40), None),
    ],
    ids=str,
)
def test_buffers_in_which_clients_leave_statistics_are_refused(
    layer: nn.Module, buffer: str | None
) -> None:
    model = nn.Sequential(layer, small_model())
    rounds, _ = private_rounds(model, sample_rate=1.0)

    def work() -> None:
        for _ in rounds.clients():
            model(torch.randn(4, 40)).square().sum().backward()
            rounds.step()
            rounds.zero_grad()

    if buffer is None:
        work()
        assert rounds.round_index == 1
    else:
        with pytest.raises(PrivacyError, match=rf"what its rounds do not train: .*{buffer}"):
            work()
        assert rounds.round_index == 0
    assert not nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize("is_restored", [False, True])
@pytest.mark.parametrize("writes", ["another optimizer", "p.data", "a frozen prototype"])
def test_what_the_rounds_do_not_train_must_stay_as_it_was(writes: str, is_restored: bool) -> None:
    body, head = small_model(), nn.Linear(50, 5)
    model = nn.Sequential(body, head)
    rounds, _ = private_rounds(body, sample_rate=1.0)
    own = torch.optim.SGD(head.parameters(), lr=0.1)
    head.requires_grad_(writes == "another optimizer")

    def write() -> None:
        if writes == "another optimizer":
            own.step()
        elif writes == "p.data":
            head.weight.data[0] = 1.5
        else:
            with torch.no_grad():
                head.weight[1].mul_(0.9)

    def work() -> None:
        for _ in rounds.clients():
            before = {name: value.clone() for name, value in head.state_dict().items()}
            model(torch.randn(4, 40)).square().sum().backward()
            rounds.step()
            write()
            if is_restored:
                head.load_state_dict(before)
            rounds.zero_grad()

    if is_restored:
        work()
        assert rounds.round_index == 1
    else:
        with pytest.raises(PrivacyError, match=r"rounds do not train: .*Linear\.weight"):
            work()
