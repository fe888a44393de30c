"""Each rank's whole contribution is bounded and noised, behind DDP's hook and in DeepSpeed."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import Exchange, TopK, register
from comm_hooks.errors import PeerError
from comm_hooks.optim.private import DPAdamBC, PrivacyEngine, PrivacyError, RankLevel
from comm_hooks.optim.private.accounting import GaussianEvent, RDPAccountant
from tests.frameworks.selection import by_default
from tests.ranks import RanksOf
from tests.test_hook import SMALL_BUCKETS_MB, MixedNet, Net, backward

RANKS = 3
NORM = 0.5
NO_NOISE = 1e-9  # a noise multiplier: what is sent is what was clipped
PLACED = [
    ("central", {"compressor": "identity"}),
    ("central", {"compressor": "topk", "density": 1 / 4}),
    ("local", {"compressor": "identity"}),
    ("local", {"compressor": "quantize", "bits": 4}),
    ("shares", {"compressor": "identity"}),
    ("shares", {"compressor": "random_k", "density": 1 / 2, "unbiased": False}),
    ("aggregate", {"compressor": "identity"}),
    ("aggregate", {"compressor": "srht", "ratio": 0.5, "memory": "none"}),
]
DENSE = {placement: {"compressor": "identity"} for placement, _ in PLACED}

warnings.filterwarnings("ignore", message="RankLevel: with noise_multiplier")


def private_model(
    noise_multiplier: float,
    placement: str = "central",
    *,
    net: Callable[[], nn.Module] = Net,
    engine: PrivacyEngine | None = None,
    ddp: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[DistributedDataParallel, RankLevel]:
    torch.manual_seed(0)
    model = DistributedDataParallel(net(), bucket_cap_mb=SMALL_BUCKETS_MB, **(ddp or {}))
    private = RankLevel(
        noise_multiplier=noise_multiplier,
        max_norm=NORM,
        placement=placement,  # type: ignore[arg-type]
        engine=engine,
    )
    register(model, private=private, **{"compressor": "identity", **settings})
    return model, private


def released(model: nn.Module) -> torch.Tensor:
    """Return the sum over ranks that is in ``p.grad``, flat."""
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double() * RANKS


def one_rank_alone(placement: str, factor: float, kind: str) -> list[tuple[float, float]]:
    """Let one rank's loss be ``factor`` times as large and the others' zero, in three passes.

    Returns the norm of the sum over ranks, and the norm of that rank's own gradient.
    """
    net: Callable[[], nn.Module] = MixedNet if kind == "16 bits" else Net
    model, _ = private_model(NO_NOISE, placement, net=net)
    twin = net()
    twin.load_state_dict(model.module.state_dict())
    norms = []
    for step in range(3):
        for which in (model, twin):
            which.zero_grad()
            inputs = torch.randn(16, 40, generator=torch.Generator().manual_seed(step))
            loss = which(inputs).square().mean() * factor * (dist.get_rank() == 1)
            if kind == "broken" and dist.get_rank() == 1:
                head = (which.module if which is model else which).head  # type: ignore[union-attr]
                head.bias.register_hook(lambda g: g * float("nan"))  # type: ignore[union-attr]
            loss.backward()
        own = torch.cat([p.grad.flatten().double() for p in twin.parameters()])  # type: ignore[union-attr]
        norms.append((float(released(model).norm()), float(own.norm())))
    return norms


@pytest.mark.parametrize("placement", by_default(["central", "aggregate"], ["local", "shares"]))
@pytest.mark.parametrize(
    ("factor", "kind"),
    [
        (1e-3, "float32"),
        (1e3, "float32"),
        (1e30, "float32"),
        (math.inf, "float32"),
        (1e3, "16 bits"),
        (1e3, "broken"),
    ],
)
def test_a_rank_changes_the_sum_by_its_bound(
    ranks_of: RanksOf, placement: str, factor: float, kind: str
) -> None:
    found = ranks_of(RANKS).run(one_rank_alone, placement, factor, kind)
    for norm, own in found[1]:
        assert norm <= NORM * (1 + 1e-3)
        if factor == 1e-3:
            assert norm == pytest.approx(own, rel=1e-3), "small gradients arrive as they are"
        elif factor == math.inf:
            assert norm < 1e-6, "what is not finite becomes zeros"
        elif kind != "broken":
            assert norm > 0.3 * NORM, "not all of it: buckets are clipped apart"
    if kind == "broken":  # DDP's first pass has a single bucket
        assert found[1][2][0] > 0.3 * NORM, "a bucket that is not finite does not empty others"


def noise_of(placement: str, settings: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of two passes without any gradient."""
    model, _ = private_model(2.0, placement, **settings)
    sums = []
    for step in range(2):
        model.zero_grad()
        (model(torch.ones(4, 40) + step) * 0).sum().backward()
        sums.append(released(model))
    return sums[0], sums[1]


@pytest.mark.parametrize("placement", sorted(DENSE))
def test_noise_has_its_variance_anew_in_every_pass(ranks_of: RanksOf, placement: str) -> None:
    found = ranks_of(RANKS).run(noise_of, placement, DENSE[placement])
    first, second = found[0]
    for own in found[1:]:
        assert torch.equal(own[0], first), "all ranks have the same sum"
        assert torch.equal(own[1], second)
    expected = 2.0 * NORM * math.sqrt(RANKS if placement == "local" else 1)
    for each in (first, second):
        assert float(each.std()) == pytest.approx(expected, rel=0.03)
    correlation = float((first * second).mean() / (first.std() * second.std()))
    assert abs(correlation) < 5 / math.sqrt(first.numel())


def accounted(placement: str, settings: dict[str, Any]) -> tuple[float, list[str], torch.Tensor]:
    engine = PrivacyEngine()
    model, _ = private_model(4.0, placement, engine=engine, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        backward(model, step, dist.get_rank())
        if step != 1:  # a release counts whether a step uses it or not
            optimizer.step()
            optimizer.zero_grad()
    epsilon = engine.get_epsilon(delta=1e-5)
    engine.set_budget(epsilon * 1.01, 1e-5)
    errors = []
    for _ in range(2):
        try:
            backward(model, 3, dist.get_rank())
        except (PrivacyError, PeerError) as error:
            errors.append(str(error))
    assert engine.get_epsilon(delta=1e-5) == epsilon, "nothing more was released"
    return epsilon, errors, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(("placement", "settings"), by_default(PLACED[1::2], PLACED[::2]))
def test_every_pass_is_in_the_ledger_and_the_budget_ends_it_on_all_ranks(
    ranks_of: RanksOf, placement: str, settings: dict[str, Any]
) -> None:
    found = ranks_of(RANKS).run(accounted, placement, settings)
    expected = RDPAccountant().epsilon([GaussianEvent(2.0, 1.0, steps=3)], 1e-5)
    for epsilon, errors, weights in found:
        assert epsilon == pytest.approx(expected)
        assert len(errors) == 2, "and again"
        assert all("the budget of epsilon" in error for error in errors)
        assert torch.equal(weights, found[0][2])


def with_adam_bc(steps: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    model, _ = private_model(1.0)
    before = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()
    optimizer = DPAdamBC(model.parameters(), lr=0.01, betas=(0.8, 0.9), gamma=1e-4)
    gradients = []
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step, dist.get_rank())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).numpy().copy())
        optimizer.step()
    after = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
    return gradients, before, after


def test_adam_bc_subtracts_the_variance_of_this_noise(ranks_of: RanksOf) -> None:
    """A NumPy reference of Algorithm 1, with Phi = (sigma C / N)^2."""
    phi = (1.0 * NORM / RANKS) ** 2
    for gradients, before, after in ranks_of(RANKS).run(with_adam_bc, 4):
        x = before.astype(np.float64)
        m, v = np.zeros_like(x), np.zeros_like(x)
        for t, gradient in enumerate(gradients, start=1):
            m = 0.8 * m + 0.2 * gradient
            v = 0.9 * v + 0.1 * gradient.astype(np.float64) ** 2
            corrected = np.maximum(v / (1 - 0.9**t) - phi, 1e-4)
            x -= 0.01 * (m / (1 - 0.8**t)) / np.sqrt(corrected)
        np.testing.assert_allclose(after, x, rtol=1e-4, atol=1e-5)


class WithStatistics(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.net, self.norm = Net(), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(x))


class Remembers(Net):
    """Makes a buffer of its first inputs, and has one of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", x.mean(0))
        return super().forward(x)


class WithWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 40, sparse=True)
        self.head = nn.Linear(40, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words((x.sum(1).abs() * 10).long() % 50))


def refusals() -> dict[str, str]:
    reuse = RankLevel(noise_multiplier=1.0, max_norm=1.0)

    def again() -> None:
        for _ in range(2):
            register(DistributedDataParallel(Net()), "topk", private=reuse)

    def optimizer_on_compressed() -> None:
        model, _ = private_model(1.0, compressor="topk")
        backward(model, 0, dist.get_rank())
        DPAdamBC(model.parameters()).step()

    def head_outside() -> None:
        model, _ = private_model(1.0)
        head = nn.Linear(10, 2)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        head(model(torch.ones(2, 40))).sum().backward()
        optimizer.step()

    def on(net: Callable[[], nn.Module]) -> None:
        model, _ = private_model(1.0, net=net)
        backward(model, 0, dist.get_rank())

    def ordinary_round() -> None:
        model = DistributedDataParallel(Net())
        state = register(model, "topk", private=RankLevel(noise_multiplier=1.0, max_norm=1.0))
        backward(model, 0, dist.get_rank())
        state.load_state_dict(register(DistributedDataParallel(Net()), "topk").state_dict())

    cases: dict[str, Callable[[], Any]] = {
        "unused": lambda: private_model(1.0, ddp={"find_unused_parameters": True}),
        "static": lambda: private_model(1.0, ddp={"static_graph": True}),
        "batch norm": lambda: on(lambda: WithStatistics(nn.BatchNorm1d(40))),
        "synchronized": lambda: RankLevel(noise_multiplier=1.0, max_norm=1.0).attach(
            Exchange(TopK()), nn.Sequential(nn.SyncBatchNorm(40))
        ),
        "new buffer": lambda: on(Remembers),
        "sparse": lambda: on(WithWords),
        "scaled": lambda: private_model(1.0, loss_scale=lambda: 1024.0),
        "warm-up": lambda: private_model(1.0, start_compression_step=5),
        "shares of signs": lambda: private_model(1.0, "shares", compressor="sign"),
        "feedback before noise": lambda: private_model(
            1.0, "aggregate", compressor="random_k", unbiased=False, memory="error_feedback"
        ),
        "again": again,
        "variance": optimizer_on_compressed,
        "head outside": head_outside,
        "state without noise": ordinary_round,
    }
    found = {}
    for name, case in cases.items():
        try:
            case()
        except (ValueError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


REFUSED = {
    "unused": "tells all ranks which parameters a rank has used",
    "static": "tells all ranks which parameters a rank has used",
    "batch norm": "RankLevel: the forward pass has changed norm.running_mean",
    "synchronized": "RankLevel: SyncBatchNorm sends statistics",
    "new buffer": "RankLevel: the forward pass has changed seen",
    "sparse": "RankLevel: sparse gradients and shards are not supported",
    "scaled": "private: gradients multiplied by a loss scale",
    "warm-up": "private: start_compression_step must be 0",
    "shares of signs": "not private (rule 5)",
    "feedback before noise": "not private (rule 10)",
    "again": "RankLevel: it protects the rounds of another model",
    "head outside": "RankLevel: this SGD has gradients of 2 parameters outside of the model",
    "variance": "DPAdamBC subtracts the variance of the noise",
    "state without noise": "the state was not saved by private training",
}


def test_what_would_leave_without_noise_is_refused(ranks_of: RanksOf) -> None:
    for found in ranks_of(2).run(refusals):
        assert found.keys() == REFUSED.keys()
        for name, expected in REFUSED.items():
            assert expected in found[name], (name, found[name])


def told(noise_multiplier: float) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        private_model(noise_multiplier)
    return [str(each.message) for each in caught if "RankLevel" in str(each.message)]


def test_epsilon_is_told_before_the_first_step(ranks_of: RanksOf) -> None:
    first, second = ranks_of(2).run(told, 2.0)
    assert not second
    once = RDPAccountant().epsilon([GaussianEvent(1.0, 1.0)], 1e-5)
    assert f"epsilon at delta 1e-05 is {once:.3g} after 1 step" in first[0]


# DeepSpeed

BLOCK = {
    "compressor": "topk",
    "density": 0.25,
    "min_numel": 64,
    "private": {"unit": "rank", "noise_multiplier": NO_NOISE, "max_norm": 0.01},
}


def warned_of_writes() -> dict[str, list[str]]:
    """Train with a frozen layer and a buffer, write after the last step, and ask for epsilon."""
    found = {}
    for what in ("nothing", "a frozen parameter", "a buffer", "thawed"):

        def net() -> nn.Module:
            made = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
            made[0].requires_grad_(False)
            made.center = nn.Buffer(torch.zeros(3))
            return made

        model, private = private_model(1.0, net=net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(4, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if what == "a frozen parameter":
            model.module[0].weight.data[dist.get_rank()] += 1.0
        elif what == "a buffer":
            model.module.center.data += 1.0
        elif what == "thawed":
            model.module[0].requires_grad_(True)
            model.module[0].weight.data += 1.0
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            private.engine.get_epsilon(1e-5)
        found[what] = [str(each.message) for each in seen]
    return found


def test_what_no_step_changes_is_compared_with_epsilon(ranks_of: RanksOf) -> None:
    for found in ranks_of(RANKS).run(warned_of_writes):
        assert found["nothing"] == found["thawed"] == []
        for what in ("a frozen parameter", "a buffer"):
            (message,) = found[what]
            assert "parameters or buffers have changed since the last private step" in message


def in_deepspeed(stage: int, dtype: str) -> tuple[float, float, int]:
    from tests.frameworks.deepspeed.common import config, engine_of, loss_of, net

    settings = config(stage, BLOCK, dtype=dtype, zero_allow_untested_optimizer=True)
    settings["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
    engine = engine_of(settings, net())
    before = torch.cat([p.detach().flatten().double() for p in engine.module.parameters()])
    wide = next(engine.module.parameters()).dtype
    loss = loss_of(engine, 0, wide) * 1e3 * (dist.get_rank() == 1)
    engine.backward(loss)
    engine.step()
    after = torch.cat([p.detach().flatten().double() for p in engine.module.parameters()])
    private = engine.comm_hooks.private
    history = private.engine.state_dict()["events"]
    return float((after - before).norm() * dist.get_world_size()), len(history), history[0]["steps"]


@pytest.mark.parametrize(
    ("stage", "dtype"), by_default([(0, "fp32"), (2, "fp32")], [(1, "fp32"), (2, "bf16")])
)
def test_a_rank_changes_a_step_of_deepspeed_by_its_bound(
    ranks_of: RanksOf, stage: int, dtype: str
) -> None:
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install deepspeed")
    for moved, events, steps in ranks_of(2).run(in_deepspeed, stage, dtype):
        assert moved <= 0.01 * (1.001 if dtype == "fp32" else 1.2), "16 bits round the weights"
        assert moved > 0.001
        assert (events, steps) == (1, 1)


def deepspeed_refusals() -> dict[str, str]:
    from tests.frameworks.deepspeed.common import config, engine_of

    def with_private(more: dict[str, Any], **settings: Any) -> Any:
        block = {**BLOCK, "private": {**BLOCK["private"], **more}}  # type: ignore[dict-item]
        return engine_of(config(0, {**block, **settings.pop("block", {})}, **settings))

    cases = {
        "sample": lambda: with_private({"unit": "sample"}),
        "misspelt": lambda: with_private({"noise": 1.0}),
        "negative": lambda: with_private({"max_norm": -1.0}),
        "fp16": lambda: with_private({}, dtype="fp16"),
        "warm-up": lambda: with_private({}, block={"start_compression_step": 3}),
        "shares": lambda: with_private({"placement": "shares"}),
        "no object": lambda: engine_of(config(0, {**BLOCK, "private": True})),
    }
    found = {}
    for name, case in cases.items():
        try:
            case()
        except ValueError as error:
            found[name] = str(error)
    return found


def test_the_block_of_deepspeed_is_checked(ranks_of: RanksOf) -> None:
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install deepspeed")
    expected = {
        "sample": "comm_hooks.private: unit must be 'rank', got 'sample': gradients arrive as",
        "misspelt": "comm_hooks.private: got an unexpected keyword argument 'noise'",
        "negative": "comm_hooks.private: RankLevel: max_norm must lie in (0, inf)",
        "fp16": "private: gradients multiplied by a loss scale are not supported",
        "warm-up": "private: start_compression_step must be 0",
        "shares": "not private (rule 5)",
        "no object": "comm_hooks.private: must be an object, got True",
    }
    for found in ranks_of(2).run(deepspeed_refusals):
        assert found.keys() == expected.keys()
        for name, message in expected.items():
            assert message in found[name], (name, found[name])
