"""A model in evaluation mode, and its state_dict(), are the server's; all else stays as it was."""

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from comm_hooks import ErrorFeedback, Exchange, TopK, register
from comm_hooks.collectives import Simulated, Transport, run_ranks
from comm_hooks.optim import LocalRounds, low_communication

Weights = list[torch.Tensor]


def weights(model: nn.Module) -> Weights:
    return [p.detach().clone() for p in model.parameters()]


def equal(first: Weights, second: Weights) -> bool:
    return all(map(torch.equal, first, second))


def trained(transport: Transport, steps: int = 3) -> tuple[nn.Module, LocalRounds]:
    """Return a model in the middle of a round, ahead of what all share."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    rounds = low_communication(
        model.named_parameters(), lr=0.01, bits_per_parameter=8.0, transport=transport
    )
    assert register(model, rounds) is rounds
    take_steps(model, rounds, range(steps), transport.rank)
    return model, rounds


def take_steps(model: nn.Module, rounds: LocalRounds, steps: range, rank: int) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(8, 16, generator=generator)).square().mean().backward()
        rounds.step()
        rounds.zero_grad()


def on_two_ranks(check: Any) -> list[Any]:
    return run_ranks(lambda transport: check(transport, *trained(transport)), 2)


def test_evaluation_shows_what_all_ranks_share_and_training_goes_on() -> None:
    def check(transport: Transport, model: nn.Module, rounds: LocalRounds) -> Weights:
        own = weights(model)
        assert model.eval() is model
        assert not model.training
        shown = weights(model)
        assert not equal(shown, own)
        assert equal(weights(model.eval()), shown)
        model.train()
        assert model.training
        assert equal(weights(model), own)
        return shown

    first, second = on_two_ranks(check)
    assert equal(first, second)


def test_what_is_saved_is_shared_in_either_mode() -> None:
    def check(transport: Transport, model: nn.Module, rounds: LocalRounds) -> dict[str, Any]:
        in_training = model.state_dict()
        assert not in_training["0.weight"].equal(model[0].weight)  # type: ignore[index]
        in_evaluation = model.eval().state_dict()
        model.train()
        for name, value in in_training.items():
            assert torch.equal(value, in_evaluation[name]), name
        return {n: v for n, v in in_training.items() if "running" not in n and "num" not in n}

    first, second = on_two_ranks(check)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_step_in_evaluation_mode_is_refused() -> None:
    def check(transport: Transport, model: nn.Module, rounds: LocalRounds) -> None:
        model.eval()
        with pytest.raises(ValueError, match="while the shared model is shown"):
            rounds.step()

    on_two_ranks(check)


@pytest.mark.parametrize("mode", [True, False])
def test_synchronized_in_either_mode(mode: bool) -> None:
    def check(transport: Transport, model: nn.Module, rounds: LocalRounds) -> Weights:
        model.train(mode)
        rounds.synchronize()
        shown = weights(model)
        assert equal(weights(model.train()), shown)
        assert equal(weights(model.eval()), shown)
        return shown

    first, second = on_two_ranks(check)
    assert equal(first, second)


@pytest.mark.parametrize("mode", [True, False])
def test_what_somebody_else_loads_counts(mode: bool) -> None:
    """As the best of several checkpoints, which is loaded at the end."""

    def check(transport: Transport, model: nn.Module, rounds: LocalRounds) -> None:
        best = {n: torch.full_like(v, 2) for n, v in model.state_dict().items()}
        model.train(mode)
        model.load_state_dict(best)
        for _ in range(2):
            model.eval()
            assert all(bool((p == 2).all()) for p in model.parameters())
            assert bool((model.state_dict()["0.weight"] == 2).all())
            model.train()
            assert all(bool((p == 2).all()) for p in model.parameters())

    on_two_ranks(check)


def test_what_is_written_in_evaluation_mode_costs_no_other_progress() -> None:
    def check(transport: Transport, model: nn.Module, rounds: LocalRounds) -> None:
        own = weights(model)
        model.eval()
        with torch.no_grad():
            model[2].bias.fill_(7.0)
            model[2].weight.add_(0.0)  # written, and the same as before
        model.train()
        for value, before, parameter in zip(weights(model), own, model.parameters(), strict=True):
            expected = torch.full_like(before, 7.0) if parameter is model[2].bias else before
            assert torch.equal(value, expected)
        with pytest.warns(UserWarning, match="count as progress of this rank"):
            take_steps(model, rounds, range(3, 4), transport.rank)

    check(Simulated(1)[0], *trained(Simulated(1)[0]))


@pytest.mark.parametrize("mode", [True, False])
def test_rounds_that_are_made_anew_take_the_place_of_the_earlier_ones(mode: bool) -> None:
    def check(transport: Transport, model: nn.Module, rounds: LocalRounds) -> None:
        rounds.synchronize()
        take_steps(model, rounds, range(3, 6), transport.rank)
        if mode:
            rounds.synchronize()
        with rounds.server_parameters():
            shared = weights(model)
        model.train(mode)
        again = low_communication(
            model.named_parameters(), lr=0.01, bits_per_parameter=8.0, transport=transport
        )
        register(model, again)
        assert equal(weights(model.train()), shared)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            take_steps(model, again, range(3), transport.rank)
            own = weights(model)
            assert not equal(weights(model.eval()), own)
            model.state_dict()
            assert equal(weights(model.train()), own)
            take_steps(model, again, range(3, 6), transport.rank)

    on_two_ranks(check)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_copies_are_plain_models_with_what_all_ranks_share() -> None:
    def check(transport: Transport, model: nn.Module, rounds: LocalRounds) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        own, shared = weights(model), state_of(model)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert all(map(torch.equal, other.state_dict().values(), shared.values()))
            assert not equal(weights(other), own)
            assert not other.eval().training
            assert model.training
            other.load_state_dict({k: v + 1 for k, v in other.state_dict().items()})
            other[2].load_state_dict(other[2].state_dict())
            assert torch.equal(other.state_dict()["0.weight"], shared["0.weight"] + 1)
            assert equal(weights(model), own)
        part = copy.deepcopy(model[0])
        assert torch.equal(part.weight, shared["0.weight"])
        averaged = AveragedModel(model)
        averaged.update_parameters(model)
        averaged.eval()
        assert model.training
        take_steps(model, rounds, range(3, 6), transport.rank)
        later = copy.deepcopy(model)
        assert all(map(torch.equal, later.state_dict().values(), state_of(model).values()))
        assert not torch.equal(later[0].weight, shared["0.weight"])
        return shared

    first, second = on_two_ranks(check)
    assert all(map(torch.equal, first.values(), second.values()))


def test_a_copy_keeps_ties() -> None:
    def check(transport: Transport) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[1].weight = model[0].weight
        rounds = low_communication(
            model.named_parameters(), lr=0.01, bits_per_parameter=8.0, transport=transport
        )
        register(model, rounds)
        model(torch.ones(1, 8)).sum().backward()
        rounds.step()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert other[1].weight is other[0].weight
            assert other[0].weight is not model[0].weight

    run_ranks(check, 2)


def test_a_model_that_is_not_the_optimizers_is_refused() -> None:
    inner = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    exchange = Exchange(TopK(density=0.5), ErrorFeedback(), transport=Simulated(2)[0])
    with pytest.raises(ValueError, match="2 of the 2 parameters of LocalRounds are not in Linear"):
        register(nn.Linear(4, 4), LocalRounds(inner, exchange, local_steps=2))


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_a_layer_that_writes_to_its_weight_is_refused(layer: Any) -> None:
    """Rows that one rank looks up and another does not would make two models of one."""
    for max_norm, trains in ((0.5, True), (0.5, False), (None, True)):
        model = nn.Sequential(layer(8, 4, max_norm=max_norm), nn.Linear(4, 4))
        model[0].weight.requires_grad_(trains)
        rounds = low_communication(
            model.named_parameters(), lr=0.1, bits_per_parameter=20.0, transport=Simulated(1)[0]
        )
        if max_norm and trains:
            with pytest.raises(ValueError, match="'0' has max_norm"):
                register(model, rounds)
        else:
            register(model, rounds)


def test_an_optimizer_that_does_not_exchange_is_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"an optimizer that exchanges by itself.* AdamW does not"):
        register(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("show", [False, True])
def test_rounds_begin_where_the_model_is_by_then(show: bool) -> None:
    """As when a pretrained model is loaded after its optimizer was made."""

    def rank(transport: Transport, before: bool) -> tuple[Weights, Weights]:
        model = nn.Linear(16, 4)
        pretrained = {n: torch.full_like(v, 0.5) for n, v in model.state_dict().items()}
        if before:
            model.load_state_dict(pretrained)
        rounds = low_communication(
            model.named_parameters(), lr=0.01, bits_per_parameter=8.0, transport=transport
        )
        if show:
            with rounds.server_parameters():
                pass
        register(model, rounds)
        model.load_state_dict(pretrained)
        take_steps(model, rounds, range(5), transport.rank)
        return weights(model), weights(model.eval())

    torch.manual_seed(0)
    early, late = (run_ranks(lambda t, b=before: rank(t, b), 2) for before in (True, False))
    for first, second in zip(early, late, strict=True):
        assert all(map(equal, first, second))


def test_rounds_go_on_from_what_is_loaded() -> None:
    def check(transport: Transport, model: nn.Module, rounds: LocalRounds) -> list[Weights]:
        loaded = copy.deepcopy(model).state_dict()
        generator = torch.Generator().manual_seed(5)
        for value in loaded.values():
            if value.dtype == torch.float32:
                value.copy_(torch.rand(value.shape, generator=generator))
        model.load_state_dict(loaded)
        expected = weights(model)
        shown = weights(model.eval())
        model.train()
        assert equal(weights(model), expected)
        rounds.synchronize()
        after = weights(model)
        take_steps(model, rounds, range(3, 9), transport.rank)
        rounds.synchronize()
        moved = max(float((a - b).abs().max()) for a, b in zip(weights(model), after, strict=True))
        assert 0 < moved < 0.3
        return [expected, shown, after, weights(model)]

    first, second = on_two_ranks(check)
    assert all(map(equal, first, second))
    expected, shown, after, _ = first
    assert equal(shown, expected)
    # What waited in residuals may have moved it by a step or two, and no more.
    assert max(float((a - b).abs().max()) for a, b in zip(after, expected, strict=True)) < 0.1


@pytest.mark.parametrize(
    ("order", "mode"), [("the model first", True), ("the rounds first", False)]
)
def test_the_model_may_be_loaded_after_the_rounds(order: str, mode: bool) -> None:
    """What a rank had done since the last exchange is in the rounds' state alone."""

    def check(transport: Transport, model: nn.Module, rounds: LocalRounds) -> None:
        saved = copy.deepcopy((model.state_dict(), rounds.state_dict()))
        again, resumed = trained(transport, steps=0)
        again.train(mode)
        if order == "the model first":
            again.load_state_dict(saved[0])
        resumed.load_state_dict(copy.deepcopy(saved[1]))  # a loaded state is the optimizer's own
        if order == "the rounds first":
            again.load_state_dict(saved[0])
        again.train()
        assert equal(weights(again), weights(model))
        take_steps(model, rounds, range(3, 9), transport.rank)
        take_steps(again, resumed, range(3, 9), transport.rank)
        assert equal(weights(again), weights(model))
        resumed.load_state_dict(saved[1])
        again.load_state_dict({n: v + 1 for n, v in saved[0].items()})  # other values count
        assert equal(weights(again), [saved[0][n] + 1 for n, _ in again.named_parameters()])

    on_two_ranks(check)


def test_what_is_written_after_the_rounds_were_loaded_is_told_of() -> None:
    def check(transport: Transport, model: nn.Module, rounds: LocalRounds) -> list[str]:
        state = copy.deepcopy((model.state_dict(), rounds.state_dict()))
        plain = copy.deepcopy(model)
        again = low_communication(
            plain.named_parameters(), lr=0.01, bits_per_parameter=8.0, transport=transport
        )
        again.load_state_dict(state[1])
        plain.load_state_dict(state[0])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            take_steps(plain, again, range(3, 5), transport.rank)
        return [str(each.message) for each in caught]

    # Warnings are caught for the whole process, of which both ranks are threads.
    messages = {message for own in on_two_ranks(check) for message in own}
    assert all("load or broadcast the model first" in message for message in messages)
    assert messages


def test_saving_between_forward_and_backward_leaves_the_pass_alone() -> None:
    def check(transport: Transport, model: nn.Module, rounds: LocalRounds) -> None:
        loss = model(torch.ones(8, 16)).square().mean()
        shared = model.state_dict()
        loss.backward()
        rounds.zero_grad()
        model.eval()
        assert equal([shared[n] for n, _ in model.named_parameters()], weights(model))

    on_two_ranks(check)


def test_who_wants_the_parameters_themselves_gets_them() -> None:
    def check(transport: Transport, model: nn.Module, rounds: LocalRounds) -> None:
        state = model.state_dict(keep_vars=True)
        assert all(state[name] is parameter for name, parameter in model.named_parameters())

    on_two_ranks(check)


@pytest.mark.parametrize("mode", [False, True])
def test_a_part_may_be_loaded(mode: bool) -> None:
    def check(transport: Transport, model: nn.Module, rounds: LocalRounds) -> Weights:
        head = model.get_submodule("2")
        others = weights(model)[:-2]
        if mode:
            model.eval()
            others = weights(model)[:-2]
        head.load_state_dict({"weight": torch.ones(4, 32), "bias": torch.zeros(4)})
        assert equal(weights(model.eval())[-2:], [torch.ones(4, 32), torch.zeros(4)])
        saved = list(model.state_dict().values())
        model.train()
        assert equal(weights(model)[-2:], [torch.ones(4, 32), torch.zeros(4)])
        assert equal(saved[-2:], [torch.ones(4, 32), torch.zeros(4)])
        if not mode:
            assert equal(weights(model)[:-2], others), "this rank's progress on the rest stays"
        return [value for value in saved if value.dtype == torch.float32][:2]

    first, second = on_two_ranks(check)
    assert equal(first, second)


def test_parameters_that_were_set_and_rounds_told_so() -> None:
    def check(transport: Transport, model: nn.Module, rounds: LocalRounds) -> Weights:
        head = model.get_submodule("2")
        with torch.no_grad():
            head.weight.fill_(1.0)
        rounds.restart([head.weight])
        rounds.synchronize()
        return weights(model)

    first, second = on_two_ranks(check)
    assert equal(first, second)
    assert (first[-2] - 1).abs().max() < 0.1


def test_whoever_writes_to_parameters_is_told_what_is_shown() -> None:
    def check(transport: Transport, model: nn.Module, rounds: LocalRounds) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.01, 0.01)
        own = weights(model)
        model.eval()
        model.state_dict()
        assert equal(weights(model), own)

    with pytest.warns(
        UserWarning, match=r"written to after the last step.*call restart\(\)"
    ) as told:
        on_two_ranks(check)
    assert len([w for w in told if "written to" in str(w.message)]) == 2, "once per rank"


def test_evaluating_and_saving_change_nothing_of_the_training_and_warn_of_nothing() -> None:
    def check(transport: Transport, model: nn.Module, rounds: LocalRounds) -> Weights:
        for step in range(3, 12, 3):
            take_steps(model, rounds, range(step, step + 3), transport.rank)
            model.eval()
            with torch.inference_mode():
                model(torch.ones(2, 16))
            model.state_dict()
            rounds.state_dict()
            model.train()
            with rounds.server_parameters():
                pass
            rounds.load_state_dict(rounds.state_dict())
            model.load_state_dict(model.state_dict())
        own = weights(model)
        rounds.synchronize()
        take_steps(model, rounds, range(12, 14), transport.rank)
        return own

    def undisturbed(transport: Transport) -> Weights:
        return weights(trained(transport, steps=12)[0])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ends = on_two_ranks(check)
    assert not [w for w in caught if "written to" in str(w.message)]
    assert all(map(equal, ends, run_ranks(undisturbed, 2)))


class WithLoss(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


def test_a_model_inside_of_what_is_registered() -> None:
    def check(transport: Transport) -> list[Weights]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        model = WithLoss(net)
        rounds = low_communication(
            model.named_parameters(), lr=0.01, bits_per_parameter=8.0, transport=transport
        )
        register(model, rounds)
        for step in range(3):
            generator = torch.Generator().manual_seed(100 * step + transport.rank)
            model(torch.randn(8, 16, generator=generator)).backward()
            rounds.step()
            rounds.zero_grad()
        own = weights(model)
        saved = [*net.state_dict().values()]
        head = [*net.get_submodule("2").state_dict().values()]
        net.get_submodule("0").eval()  # a part by itself changes nothing
        assert equal(weights(model), own)
        net.eval()
        shown = weights(net)
        net.train()
        assert equal(weights(model), own)
        assert not equal(shown, own)
        return [saved, shown, head]

    first, second = run_ranks(check, 2)
    assert all(map(equal, first, second))
    saved, shown, head = first
    assert equal(saved, shown)
    assert equal(head, shown[2:])


def test_an_optimizer_of_a_part_of_the_model_is_refused() -> None:
    def check(transport: Transport) -> None:
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
        exchange = Exchange(TopK(), ErrorFeedback(), transport=transport)
        rounds = LocalRounds(
            torch.optim.SGD(model[1].parameters(), lr=1.0), exchange, local_steps=2
        )
        with pytest.raises(
            ValueError, match=r"2 parameters of Sequential .* first of them 0.weight"
        ):
            register(model, rounds)
        model[0].requires_grad_(False)
        register(model, rounds)

    run_ranks(check, 2)
