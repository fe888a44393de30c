"""compression_hook under DDP as people use it: several buckets, rebuilt, in every mode."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import comm_hooks
from comm_hooks import (
    CompressionState,
    ConfigMismatchError,
    ErrorFeedback,
    Exchange,
    Quantize,
    TopK,
    compression_hook,
    register,
    skip_hook,
)
from comm_hooks.config import build
from comm_hooks.exchange.saved_state import seal_own
from comm_hooks.exchange.sparse import average_sparse
from tests.ranks import RanksOf

SMALL_BUCKETS_MB = 0.02


class Net(nn.Module):
    """Layers that run in another order than they are registered in, so DDP rebuilds buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(64, 48)
        self.a = nn.Linear(40, 64)
        self.b = nn.Linear(64, 64)
        self.unused = nn.Linear(64, 64)
        self.head = nn.Linear(48, 10)
        self.use_all = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.b(torch.relu(self.a(x))))
        if self.use_all:
            hidden = hidden + self.unused(hidden)
        return self.head(torch.relu(self.c(hidden)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 3)
        self.second = nn.Conv2d(24, 40, 3)
        self.head = nn.Linear(40, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x[:, :27].reshape(-1, 3, 3, 3).repeat(1, 1, 3, 3)
        images = images.contiguous(memory_format=torch.channels_last)
        features = torch.relu(self.second(torch.relu(self.first(images))))
        return self.head(features.mean((2, 3)))


class MixedNet(nn.Module):
    """bfloat16 and float32 parameters, which DDP puts into separate buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(40, 96).to(torch.bfloat16)
        self.deep = nn.Linear(96, 96)
        self.head = nn.Linear(96, 10).to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.wide(x.to(torch.bfloat16))).float()
        return self.head(torch.relu(self.deep(hidden)).to(torch.bfloat16)).float()


def channels_last_net() -> nn.Module:
    return ConvNet().to(memory_format=torch.channels_last)


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "static_graph": {"ddp": {"static_graph": True}},
    "find_unused_parameters": {"ddp": {"find_unused_parameters": True}, "drop_layer": True},
    "gradient_as_bucket_view": {"ddp": {"gradient_as_bucket_view": True}},
    "one bucket": {"ddp": {"bucket_cap_mb": 25}},
    "no_sync": {"micro_batches": 3},
    "channels_last": {"net": channels_last_net},
    "bfloat16 and float32": {"net": MixedNet},
}


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 40, generator=generator) + rank
    return inputs, torch.randint(0, 10, (16,), generator=generator)


def backward(model: nn.Module, step: int, rank: int) -> None:
    inputs, targets = batch(step, rank)
    nn.functional.cross_entropy(model(inputs), targets).backward()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def train_and_account(mode: str, compressor: Any, collective: str) -> dict[str, Any]:
    """Train a few steps; return for each parameter by how much the accounts fail to balance.

    A twin without DDP, given the same weights, tells the true local gradient of every step.
    """
    options = MODES[mode]
    rank, world = dist.get_rank(), dist.get_world_size()
    model = options.get("net", Net)()
    twin = copy.deepcopy(model)
    ddp_options = {"bucket_cap_mb": SMALL_BUCKETS_MB, **options.get("ddp", {})}
    ddp = DistributedDataParallel(model, **ddp_options)
    state = register(ddp, compressor, collective=collective, min_numel=64)
    compositions = set()
    micro_batches = options.get("micro_batches", 1)

    true = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in model.named_parameters()}
    sent = copy.deepcopy(true)
    identical = True
    for step in range(5):
        twin.load_state_dict(model.state_dict())
        for net in (model, twin):
            net.zero_grad()
            if options.get("drop_layer"):
                net.use_all = step % 2 == 0
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            if last:
                backward(ddp, 10 * step + micro, rank)
            else:
                with ddp.no_sync():
                    backward(ddp, 10 * step + micro, rank)
            backward(twin, 10 * step + micro, rank)
        for name, gradient in gradients(twin).items():
            true[name] += gradient
        for name, gradient in gradients(model).items():
            sent[name] += gradient
            copies = [torch.empty_like(gradient) for _ in range(world)]
            dist.all_gather(copies, gradient)
            identical &= all(torch.equal(c, gradient) for c in copies)
        compositions |= {bucket.layout.segments for bucket in state.exchange.buckets}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad

    errors = {}
    exchange = state.exchange
    assert exchange.memory
    assert exchange.state.server_memory
    workers, shards = exchange.memory.state_dict(), exchange.state.server_memory.state_dict()
    for name, total in true.items():
        if name in workers:
            flat = total.contiguous().flatten()
            flat -= workers[name]
            if name in shards:
                start = rank * shards[name].numel()
                stop = min(start + shards[name].numel(), total.numel())
                flat[start:stop] -= world * shards[name][: max(0, stop - start)]
            total.copy_(flat.view(total.shape))
        dist.all_reduce(total)
        errors[name] = float((total / world - sent[name]).abs().max())
    return {
        "errors": errors,
        "identical": identical,
        "rebuilt": ddp._has_rebuilt_buckets,
        "compressed": sorted(workers),
        "stats": state.stats(),
        "buckets": len(exchange.buckets),
        "compositions": len(compositions),
    }


@pytest.mark.parametrize(
    ("mode", "world", "collective"),
    [
        *((mode, 2, "all_gather") for mode in MODES),
        ("no_sync", 4, "sharded"),
        *(
            pytest.param(mode, 4, "sharded", marks=pytest.mark.slow)
            for mode in MODES
            if mode != "no_sync"
        ),
    ],
)
def test_nothing_is_lost_and_everybody_agrees(
    ranks_of: RanksOf, mode: str, world: int, collective: str
) -> None:
    reports = ranks_of(world).run(train_and_account, mode, TopK(density=0.1), collective)
    # The gradient that leaves a bfloat16 bucket is rounded to 8 bits; five steps of size < 1.
    tolerance = 0.02 if mode == "bfloat16 and float32" else 1e-5
    for report in reports:
        assert report["identical"]
        assert max(report["errors"].values()) < tolerance, report["errors"]
        assert report["compressed"], "the large parameters must have gone through the compressor"
        assert all("bias" not in name for name in report["compressed"])
        assert report["stats"]["steps"] == 5
        assert report["stats"]["residual_norm"] > 0
        assert report["stats"]["bytes_sent"] < report["stats"]["bytes_uncompressed"]
    if mode in ("default", "static_graph", "gradient_as_bucket_view"):
        assert reports[0]["rebuilt"]
        assert reports[0]["buckets"] >= 2, "this test needs several buckets"
        assert reports[0]["compositions"] > reports[0]["buckets"], "and others before the rebuild"


class Sparse(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 24, sparse=sparse)
        self.head = nn.Linear(24, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens))


class Complex(nn.Module):
    """A model with a complex parameter between real ones, in one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.mode = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x) * self.mode).abs().sum()


def complex_parameters() -> None:
    ddp = DistributedDataParallel(Complex())
    register(ddp, "quantize", bits=2)
    with pytest.raises(ValueError, match="complex parameters cannot be exchanged: split them"):
        ddp(torch.ones(2, 8)).backward()


def test_complex_parameters_are_refused_with_what_to_do(ranks_of: RanksOf) -> None:
    ranks_of(2).run(complex_parameters)


def sparse_embedding() -> tuple[float, bool, float]:
    rank = dist.get_rank()
    models = [Sparse(sparse) for sparse in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    plain, hooked = (DistributedDataParallel(m) for m in models)
    state = register(hooked, "topk", density=1.0, value_bits=32, min_numel=64)
    generator = torch.Generator().manual_seed(rank)
    for step in range(2):
        # Another number of tokens on every rank, and none on rank 0 in the first step.
        tokens = torch.randint(0, 50, (7 * rank + step,), generator=generator)
        for model in (plain, hooked):
            model.zero_grad()
            anchor = sum(p.sum() for p in model.module.head.parameters())
            (model(tokens).square().sum() + anchor).backward()
    theirs = plain.module.table.weight.grad
    ours = hooked.module.table.weight.grad
    assert theirs is not None
    assert ours is not None
    error = float((theirs - ours.to_dense()).abs().max())
    return error, ours.is_sparse, state.stats()["bytes_sent"]


def test_sparse_gradients_stay_sparse_and_exact(ranks_of: RanksOf) -> None:
    for error, is_sparse, sent in ranks_of(4).run(sparse_embedding):
        assert error < 1e-5
        assert is_sparse
        assert sent > 0


def sparse_mean(dim: int, dtype: torch.dtype) -> tuple[float, torch.dtype]:
    """Ranks have one to four rows, some of them the same."""
    rank = dist.get_rank()
    exchange = Exchange(TopK(density=0.5))
    tables = []
    for each in range(dist.get_world_size()):
        rows = torch.arange(each + 1)
        values = torch.randn(each + 1, dim, generator=torch.Generator().manual_seed(each))
        tables.append(torch.sparse_coo_tensor(rows[None], values.to(dtype), (9, dim)))
    expected = torch.stack([table.to_dense().double() for table in tables]).mean(0)
    mean = average_sparse(exchange, tables[rank]).wait()
    return float((mean.to_dense().double() - expected).abs().max()), mean.dtype


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(1, torch.float32), (5, torch.bfloat16), (5, torch.float16), (50, torch.float64)],
)
def test_sparse_gradients_of_any_width_and_dtype(
    ranks_of: RanksOf, dim: int, dtype: torch.dtype
) -> None:
    for error, found in ranks_of(4).run(sparse_mean, dim, dtype):
        assert found is dtype
        assert error <= 4 * torch.finfo(dtype).eps  # of sums of a few numbers of size 1


def empty_parameters(first: str) -> list[float]:
    """In a bucket of their own, or together with others."""
    model = nn.Module()
    model.register_parameter("a", nn.Parameter(torch.zeros(0, 3, dtype=getattr(torch, first))))
    model.layer = nn.Linear(16, 16, bias=False)
    model.forward = lambda x: model.layer(x) + model.a.sum().float()  # type: ignore[method-assign]
    ddp = DistributedDataParallel(model)
    state = register(ddp, "topk", density=1.0, value_bits=32, min_numel=8)
    ddp(torch.full((2, 16), float(1 + dist.get_rank()))).sum().backward()
    assert state.stats()["steps"] == 1
    return model.layer.weight.grad.sum(1).tolist()


@pytest.mark.parametrize("first", ["float32", "float64"])
def test_parameters_without_elements_have_nothing_to_say(ranks_of: RanksOf, first: str) -> None:
    one, other = ranks_of(2).run(empty_parameters, first)
    assert one == other == [16 * 3.0] * 16


def poisoned_step(collective: str) -> dict[str, Any]:
    rank = dist.get_rank()
    model = Net()
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS_MB)
    state = register(ddp, "topk", density=0.1, min_numel=64, collective=collective)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state.loss_scale = scaler.get_scale
    history = []
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = batch(step, rank)
        if step == 2 and rank == 1:
            inputs[0, 0] = float("inf")
        before = copy.deepcopy(model.state_dict())
        assert state.exchange.memory
        residual = state.exchange.memory.state_dict()
        scaler.scale(nn.functional.cross_entropy(ddp(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        after = state.exchange.memory.state_dict()
        history.append(
            {
                "scale": scaler.get_scale(),
                "moved": any(not torch.equal(before[n], p) for n, p in model.state_dict().items()),
                "residual kept": all(torch.equal(residual[n], after[n]) for n in residual),
                "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
            }
        )
    return {"history": history, "norm": state.stats()["residual_norm"]}


@pytest.mark.parametrize("collective", ["all_gather", "sharded"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks_of: RanksOf, collective: str) -> None:
    reports = ranks_of(2).run(poisoned_step, collective)
    for report in reports:
        history = report["history"]
        assert [h["scale"] for h in history] == [1024, 1024, 512, 512]
        assert [h["moved"] for h in history] == [True, True, False, True]
        assert history[2]["residual kept"]
        assert not history[3]["residual kept"]
        assert all(h["finite"] for h in history)
        # In unscaled units the residual has the size of a gradient; scaled it would be thousands.
        assert report["norm"] < 50


def resume(as_registered: bool, compressor: str, granularity: str, collective: str) -> bool:
    """Train 6 steps, or 3, save, rebuild everything from the file and train 3 more."""
    rank = dist.get_rank()

    def start() -> tuple[DistributedDataParallel, CompressionState]:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Net(), bucket_cap_mb=SMALL_BUCKETS_MB)
        settings: Any = {
            "collective": collective,
            "granularity": granularity,
            "min_numel": 64,
        }
        if as_registered:
            return ddp, register(ddp, compressor, **settings)
        made = build("compressor", compressor)
        state = CompressionState(made, build("memory", "auto", compressor=made), **settings)
        ddp.register_comm_hook(state, compression_hook)
        return ddp, state

    def train(ddp: DistributedDataParallel, steps: range) -> None:
        for step in steps:
            ddp.zero_grad()
            backward(ddp, step, rank)
            with torch.no_grad():
                for p in ddp.parameters():
                    p -= 0.05 * p.grad

    ddp, state = start()
    train(ddp, range(3))
    file = io.BytesIO()
    torch.save({"model": ddp.module.state_dict(), "hook": state.state_dict()}, file)
    train(ddp, range(3, 6))
    uninterrupted = ddp.module.state_dict()

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    ddp, state = start()
    ddp.module.load_state_dict(saved["model"])
    state.load_state_dict(saved["hook"])
    train(ddp, range(3, 6))
    return all(torch.equal(p, uninterrupted[n]) for n, p in ddp.module.state_dict().items())


@pytest.mark.parametrize(
    ("as_registered", "compressor", "granularity", "collective"),
    [
        (True, "topk", "parameter", "auto"),
        (False, "topk", "bucket", "auto"),
        (True, "count_sketch", "bucket", "auto"),
        (True, "sign", "bucket", "sharded"),
    ],
)
def test_a_resumed_run_ends_bit_for_bit_as_one_that_was_not_interrupted(
    ranks_of: RanksOf, as_registered: bool, compressor: str, granularity: str, collective: str
) -> None:
    outcomes = ranks_of(2).run(resume, as_registered, compressor, granularity, collective)
    assert all(outcomes)


def half_precision(collective: str, scaled: bool) -> tuple[float, bool]:
    """Return what was lost, relative to what was given, and whether all that came was finite."""
    model = nn.Linear(64, 64, bias=False).half()
    ddp = DistributedDataParallel(model)
    nodes = {"ranks_per_node": 1} if collective == "hierarchical" else {}
    scale = 2.0 if scaled else 1.0
    state = register(
        ddp, "topk", density=1 / 64, min_numel=1, collective=collective, loss_scale=lambda: scale,  # type: ignore[arg-type]
        **nodes,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(dist.get_rank())
    given = torch.zeros(64, 64, dtype=torch.float64)
    received = torch.zeros(64, 64, dtype=torch.float64)
    finite = True
    for _ in range(40):
        gradient = 4000 * torch.randn(64, 64, generator=generator).half()
        mean = gradient.double()
        dist.all_reduce(mean)
        given += mean / 2 / scale
        ddp.zero_grad()
        (ddp(torch.eye(64).half()) * gradient.T).sum().backward()
        grad = model.weight.grad
        assert grad is not None
        finite &= bool(grad.isfinite().all())
        received += grad.double() / scale
    kept = state.state_dict()["memory"]["weight"].double()
    if collective == "hierarchical":
        kept = kept[: 64 * 64]
    dist.all_reduce(kept)
    lost = given - received - kept.view(64, 64) / 2
    return float(lost.norm() / given.norm()), finite


@pytest.mark.parametrize(("collective", "scaled"), [("all_gather", True), ("hierarchical", False)])
def test_what_float16_cannot_hold_arrives_later(
    ranks_of: RanksOf, collective: str, scaled: bool
) -> None:
    """What has gathered over many steps and is sent at once would be infinite."""
    for lost, finite in ranks_of(2).run(half_precision, collective, scaled):
        assert finite
        assert lost < 0.002


def load_foreign_state() -> None:
    ddp = DistributedDataParallel(Net())
    state = register(ddp, "topk", min_numel=64)
    saved = state.state_dict()
    saved["memory"] = {"another.weight": torch.zeros(64)}
    state.load_state_dict(seal_own(saved))


def test_the_state_of_another_model_is_refused(ranks_of: RanksOf) -> None:
    for outcome in ranks_of(2).outcomes(load_foreign_state):
        assert isinstance(outcome.error, ValueError)
        assert "parameters that this model does not have: another.weight" in str(outcome.error)


def misconfigured(early: bool) -> None:
    density = 0.1 if dist.get_rank() < 3 else 0.2
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=SMALL_BUCKETS_MB)
    if early:
        register(ddp, "topk", density=density)
        raise AssertionError("register() must refuse")
    ddp.register_comm_hook(CompressionState(TopK(density=density)), compression_hook)
    backward(ddp, 0, dist.get_rank())


@pytest.mark.parametrize("early", [True, False], ids=["register", "register_comm_hook"])
def test_ranks_configured_differently_fail_together(ranks_of: RanksOf, early: bool) -> None:
    for outcome in ranks_of(4).outcomes(misconfigured, early):
        assert isinstance(outcome.error, ConfigMismatchError), outcome
        assert "density is 0.1 on ranks 0, 1, 2, 0.2 on rank 3" in str(outcome.error)


def uneven_inputs() -> bool:
    rank = dist.get_rank()
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=SMALL_BUCKETS_MB)
    register(ddp, "topk", density=0.1, min_numel=64)
    with ddp.join():
        for step in range(2 + rank):
            ddp.zero_grad()
            backward(ddp, step, rank)
    return True


def one_state_in_two_models(named: bool) -> str:
    first, second = Net(), Net()
    rank = dist.get_rank()
    state = CompressionState(TopK(), named_parameters=first.named_parameters() if named else None)
    ddp_models = [DistributedDataParallel(net) for net in (first, second)]
    for ddp_model in ddp_models:
        ddp_model.register_comm_hook(state, compression_hook)
    backward(ddp_models[0], 0, rank)
    # The same model in another wrapper is another matter.
    again = DistributedDataParallel(first)
    again.register_comm_hook(state, compression_hook)
    backward(again, 1, rank)
    try:
        backward(ddp_models[1], 2, rank)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("named", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_state_in_two_models_is_refused(ranks_of: RanksOf, named: bool) -> None:
    for message in ranks_of(2).run(one_state_in_two_models, named):
        assert "CompressionState: this state belongs to another model: give each DDP" in message


def test_uneven_inputs_under_join_end(ranks_of: RanksOf) -> None:
    assert all(ranks_of(2).run(uneven_inputs))


def skip_keeps_local_gradients() -> bool:
    model = Net()
    twin = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS_MB)
    ddp.register_comm_hook(None, skip_hook)
    for net in (ddp, twin):
        backward(net, 0, dist.get_rank())
    ours, local = gradients(model), gradients(twin)
    return all(torch.equal(ours[n], local[n]) for n in local)


def test_skip_hook_communicates_nothing(ranks_of: RanksOf) -> None:
    assert all(ranks_of(2).run(skip_keeps_local_gradients))


def test_a_state_tells_what_is_set() -> None:
    memory = ErrorFeedback(4, decay=0.5)
    state = CompressionState(Quantize(bits=8), memory, "hierarchical", ranks_per_node=2)
    again = eval(repr(state), vars(comm_hooks))
    assert repr(again) == repr(state)
    assert again.exchange.config() == state.exchange.config()


def test_a_state_tells_where_the_loss_scale_comes_from() -> None:
    scaler = torch.amp.GradScaler("cpu")
    told = repr(CompressionState(TopK(), loss_scale=scaler.get_scale))
    assert told.startswith("CompressionState(TopK(")
    assert told.endswith(f"downlink=None, loss_scale={scaler.get_scale!r})")


@pytest.mark.parametrize("named", [nn.Linear(2, 2).parameters(), 3, ["w"], {"w": torch.ones(2)}])
def test_names_that_are_not_pairs_are_refused(named: Any) -> None:
    with pytest.raises(ValueError, match=r"must be what model.named_parameters\(\) returns, got"):
        CompressionState(TopK(), named_parameters=named)
