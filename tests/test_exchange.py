"""The invariants of a round, in simulated worlds, whatever the compressor and the route."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_hooks import (
    SRHT,
    Compressor,
    ConfigMismatchError,
    CountSketch,
    Differences,
    ErrorFeedback,
    Exchange,
    GaussianSketch,
    Identity,
    MomentumCorrection,
    PermK,
    Quantize,
    RandomK,
    Sign,
    TopK,
)
from comm_hooks.collectives import Simulated
from comm_hooks.exchange import ExchangeSettings
from comm_hooks.memory.base import Memory
from tests import worlds
from tests.compressors.catalog import representative

WITH_FEEDBACK = [
    TopK(density=0.1),
    TopK(density=0.02, value_bits=1),
    Sign(block_size=64),
    Sign(block_size=None, scale="rms"),
    Quantize(bits=4),
    Quantize(bits=4, stochastic=True),
    RandomK(density=0.2, unbiased=False),
    Identity(),
]
WITHOUT_FEEDBACK = [CountSketch(0.1), SRHT(0.1), GaussianSketch(0.2), RandomK(0.1), PermK()]
ROUTES = [
    (compressor, collective)
    for compressor in [*WITH_FEEDBACK, *WITHOUT_FEEDBACK]
    for collective in ExchangeSettings(compressor, None).carriers()
]
every_route = pytest.mark.parametrize(("compressor", "collective"), representative(ROUTES))

SHAPES = {"a": (64, 40), "b": (33,), "c": (64, 40), "d": (17, 101), "e": (3, 3), "f": (1, 2048)}
Gradients = dict[str, torch.Tensor]


class World(worlds.World):
    """Ranks with an exchange each, on gradients that differ between ranks and steps."""

    def __init__(self, size: int, compressor: Compressor, **options: object) -> None:
        super().__init__(size, compressor, **options)
        self._generator = torch.Generator().manual_seed(size)

    def gradients(self, names: str, dtype: torch.dtype = torch.float32) -> list[Gradients]:
        return [
            {n: torch.randn(SHAPES[n], generator=self._generator).to(dtype) for n in names}
            for _ in self.exchanges
        ]

    def average(self, gradients: list[Gradients], **options: Any) -> list[Gradients]:
        """Return what each rank ends up with, leaving the arguments alone."""
        results = [{n: g.clone() for n, g in own.items()} for own in gradients]
        self.run(results, **options)
        return results

    def residual(self, name: str) -> torch.Tensor:
        """Return all that any rank still has to send of a parameter, in units of the mean."""
        size = self.simulated.world_size
        total = torch.zeros(SHAPES[name]).flatten()
        for rank, exchange in enumerate(self.exchanges):
            assert exchange.memory
            assert exchange.state.server_memory
            worker = exchange.memory.state_dict().get(name)
            if worker is not None:
                total += worker / size
            shard = exchange.state.server_memory.state_dict().get(name)
            if shard is not None:
                start = rank * shard.numel()
                stop = min(start + shard.numel(), total.numel())
                total[start:stop] += shard[: max(0, stop - start)]
        return total.view(SHAPES[name])


def mean(gradients: list[Gradients], name: str) -> torch.Tensor:
    return torch.stack([own[name] for own in gradients]).mean(0)


@every_route
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("granularity", ["parameter", "bucket"])
@pytest.mark.filterwarnings("ignore:world size is 1")
def test_everybody_agrees_and_small_parameters_are_exact(
    compressor: Compressor, collective: str, size: int, granularity: str
) -> None:
    world = World(size, compressor, collective=collective, min_numel=16, granularity=granularity)
    for _ in range(3):
        gradients = world.gradients("abcdef")
        results = world.average(gradients)
        for name in SHAPES:
            for result in results[1:]:
                assert torch.equal(result[name], results[0][name])
        for name in "be":
            torch.testing.assert_close(results[0][name], mean(gradients, name))


@pytest.mark.parametrize(
    ("compressor", "collective", "granularity"),
    representative(
        (*route, granularity)
        for route in ROUTES
        if route[0].bounds_residuals
        for granularity in ("parameter", "bucket")
    ),
)
@settings(max_examples=3)
@given(
    size=st.integers(2, 4),
    buckets=st.lists(st.permutations("acdf").map("".join), min_size=2, max_size=6),
    cut=st.integers(1, 3),
)
def test_nothing_is_lost_while_buckets_are_rebuilt(
    compressor: Compressor,
    collective: str,
    granularity: str,
    size: int,
    buckets: list[str],
    cut: int,
) -> None:
    """Sum of true gradients = sum of what was sent + residual, for every parameter.

    Every step has another division into buckets and another order within them.
    """
    world = World(size, compressor, collective=collective, granularity=granularity)
    true = {name: torch.zeros(SHAPES[name]) for name in "acdf"}
    sent = {name: torch.zeros(SHAPES[name]) for name in "acdf"}
    for order in buckets:
        for bucket in (order[:cut], order[cut:]):
            gradients = world.gradients(bucket)
            results = world.average(gradients)
            for name in bucket:
                true[name] += mean(gradients, name)
                sent[name] += results[0][name]
    for name in "acdf":
        # float32 sums of a few dozen numbers of size 1
        torch.testing.assert_close(
            sent[name] + world.residual(name), true[name], atol=2e-5, rtol=1e-5
        )


@every_route
def test_a_bucket_may_hold_only_exempt_or_only_compressed_parameters(
    compressor: Compressor, collective: str
) -> None:
    world = World(3, compressor, collective=collective)
    for names in ("be", "ac"):
        gradients = world.gradients(names)
        results = world.average(gradients)
        assert torch.equal(results[0][names[0]], results[2][names[0]])
        if names == "be":
            torch.testing.assert_close(results[0]["b"], mean(gradients, "b"))


@pytest.mark.parametrize("collective", ["all_gather", "sharded"])
def test_one_rank_that_is_not_finite_spoils_the_round_for_all_and_no_residual(
    collective: str,
) -> None:
    world = World(3, TopK(0.1), collective=collective)
    world.average(world.gradients("abcdef"))
    before = {name: world.residual(name) for name in "acdf"}
    for poison in (float("inf"), float("nan")):
        gradients = world.gradients("abcdef")
        gradients[1]["c"][5, 5] = poison
        for result in world.average(gradients):
            assert all(tensor.isnan().all() for tensor in result.values())
    for name, residual in before.items():
        assert torch.equal(world.residual(name), residual)
    assert world.average(world.gradients("abcdef"))[0]["a"].isfinite().all()


@pytest.mark.parametrize("compressor", representative(WITHOUT_FEEDBACK))
def test_not_finite_is_seen_even_where_it_is_not_sent(compressor: Compressor) -> None:
    world = World(2, compressor)
    gradients = world.gradients("ac")
    gradients[1]["c"][5, 5] = float("inf")
    for result in world.average(gradients):
        assert all(tensor.isnan().all() for tensor in result.values())


def test_a_parameter_without_gradient_keeps_its_residual() -> None:
    """DDP drops what a hook returns for a parameter that no rank used."""
    world = World(2, TopK(0.1))
    world.average(world.gradients("ac"))
    before = world.residual("c")
    gradients = world.gradients("ac")
    for own in gradients:
        own["c"].zero_()
    results = world.average(gradients)
    assert not results[0]["c"].any()
    assert torch.equal(world.residual("c"), before)
    assert before.any()


def test_exact_rounds_leave_the_memory_alone() -> None:
    world = World(2, TopK(0.1))
    world.average(world.gradients("a"))
    before = world.residual("a")
    gradients = world.gradients("a")
    torch.testing.assert_close(
        world.average(gradients, compress=False)[0]["a"], mean(gradients, "a")
    )
    assert torch.equal(world.residual("a"), before)


@pytest.mark.parametrize("names", ["a", "abc"])
def test_a_message_made_in_the_workspace_is_averaged_in_place(names: str) -> None:
    world, other = (World(3, TopK(0.1)) for _ in range(2))
    for _ in range(3):
        gradients = world.gradients(names)
        messages = [e.workspace(g) for e, g in zip(other.exchanges, gradients, strict=True)]
        for message, own in zip(messages, gradients, strict=True):
            for name in names:
                message[name].copy_(own[name])
        other.run(messages)
        for message, expected in zip(messages, world.average(gradients), strict=True):
            for name in names:
                assert torch.equal(message[name], expected[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_come_back_as_they_came(dtype: torch.dtype) -> None:
    world = World(2, Identity())
    gradients = world.gradients("ab", dtype)
    result = world.average(gradients)[0]
    assert result["a"].dtype == dtype
    torch.testing.assert_close(
        result["a"], mean(gradients, "a"), atol=1e-6 if dtype == torch.float64 else 1e-2, rtol=0
    )


def test_permuted_parts_of_equal_vectors_are_exact() -> None:
    world = World(4, PermK())
    gradients = [world.gradients("ad")[0]] * 4
    torch.testing.assert_close(world.average(gradients)[0]["d"], gradients[0]["d"])


@pytest.mark.parametrize("granularity", ["parameter", "bucket"])
def test_granularity_decides_what_is_sketched_together(granularity: str) -> None:
    world = World(2, SRHT(0.25), granularity=granularity)
    gradients = world.gradients("ac")
    for own in gradients:
        own["c"].zero_()
    leaked = world.average(gradients)[0]["c"].any()
    assert bool(leaked) == (granularity == "bucket")


def test_draws_are_fresh_every_step_and_depend_on_the_seed() -> None:
    outcomes = []
    for seed in (0, 1):
        world = World(2, RandomK(0.1), seed=seed)
        gradients = world.gradients("a")
        outcomes += [world.average(gradients)[0]["a"] for _ in range(3)]
    for one, other in itertools.combinations(outcomes, 2):
        assert not torch.equal(one, other)


def test_shards_and_directions_draw_differently() -> None:
    world = World(2, RandomK(0.1, unbiased=False), collective="sharded")
    sent = world.average([{"f": torch.ones(1, 2048)} for _ in range(2)])[0]["f"]
    first, second = sent.view(2, 1024)
    assert not torch.equal(first, second)
    # What survives both directions is what was drawn twice: 1 % of the elements, not 10 %.
    assert 0.001 < float(sent.ne(0).float().mean()) < 0.03


def test_auto_takes_the_route_of_fewest_bytes() -> None:
    for compressor in (TopK(0.1), Sign(), CountSketch(0.1), PermK()):
        for size, granularity in ((2, "bucket"), (5, "parameter")):
            sent = {}
            for collective in ("auto", *ExchangeSettings(compressor, None).carriers()):
                world = World(size, compressor, collective=collective, granularity=granularity)
                world.average(world.gradients("abcdef"))
                sent[collective] = world.exchanges[0].stats()["bytes_sent"]
            # What can be summed is, whatever a header costs.
            assert sent["auto"] == sent.get("all_reduce", min(sent.values()))
            assert sent["auto"] <= min(sent.values()) + 12 * 4 * size


@pytest.mark.parametrize("memory", [Differences, MomentumCorrection, ErrorFeedback])
def test_auto_compresses_twice_only_where_the_source_may(memory: type[Memory]) -> None:
    sent = {}
    for collective in ("auto", "all_gather", "sharded"):
        world = World(8, TopK(0.1), memory=memory, collective=collective)
        world.average(world.gradients("abcdef"))
        sent[collective] = world.exchanges[0].stats()["bytes_sent"]
    kept = "sharded" if memory is ErrorFeedback else "all_gather"
    assert sent["auto"] == sent[kept] != sent["all_gather" if kept == "sharded" else "sharded"]


def test_auto_does_not_compress_twice_to_save_what_rounding_costs() -> None:
    """Of 1056 elements 5 % are 53, of each half of them 26."""
    sent = {}
    for collective in ("auto", "all_reduce", "sharded"):
        world = World(2, CountSketch(0.05), collective=collective, seed=1)
        gradients = [{str(i): torch.ones(32, 33) for i in range(40)} for _ in range(2)]
        world.average(gradients)
        sent[collective] = world.exchanges[0].stats()["bytes_sent"]
    assert sent["sharded"] < sent["all_reduce"] == sent["auto"]


def test_a_bucket_in_shards_is_compressed_as_one_vector_per_owner() -> None:
    """Small parameters compete for what is sent, so the largest elements of all are."""
    world = World(2, TopK(1 / 64), collective="sharded", granularity="bucket")
    gradients = [{str(i): torch.ones(32, 32) for i in range(8)} for _ in range(2)]
    for own in gradients:
        own["3"] *= 10.0
    mean = world.average(gradients)[0]
    sent = {name: int(tensor.count_nonzero()) for name, tensor in mean.items()}
    assert sent.pop("3") == 8 * 32 * 32 // 64
    assert not any(sent.values())


def test_what_owners_remember_is_of_parameters_however_they_are_compressed() -> None:
    saved = {}
    for granularity in ("parameter", "bucket"):
        world = World(3, TopK(0.1), collective="sharded", granularity=granularity)
        world.average(world.gradients("acdf"))
        saved[granularity] = world.exchanges[1].state_dict()["server_memory"]
    shapes = [{name: row.shape for name, row in state.items()} for state in saved.values()]
    assert shapes[0] == shapes[1]
    assert set(shapes[0]) == set("acdf")


@pytest.mark.parametrize("granularity", ["parameter", "bucket"])
def test_means_go_back_by_the_compressor_of_the_downlink(granularity: str) -> None:
    options: dict[str, Any] = {"collective": "sharded", "granularity": granularity}
    both = World(4, TopK(1 / 64), downlink=TopK(1 / 16), **options)
    there = World(4, TopK(1 / 64), downlink=Identity(), **options)
    back = World(4, Identity(), downlink=TopK(1 / 16), **options)
    for _ in range(3):
        gradients = both.gradients("acf")
        expected = back.average(there.average(gradients))[0]
        for name, tensor in both.average(gradients)[0].items():
            torch.testing.assert_close(tensor, expected[name])
    exact = World(4, Identity(), **options)
    exact.average(exact.gradients("acf"))
    sent = [world.exchanges[0].bytes_per_round(SHAPES) for world in (both, exact, there, back)]
    assert sent[0] + sent[1] == sent[2] + sent[3]


def test_what_a_downlink_drops_is_sent_later() -> None:
    world = World(3, TopK(1 / 64), collective="sharded", downlink=TopK(1 / 16))
    wanted = sent = torch.zeros(SHAPES["a"])
    for _ in range(5):
        gradients = world.gradients("a")
        wanted = wanted + mean(gradients, "a")
        sent = sent + world.average(gradients)[0]["a"]
        torch.testing.assert_close(sent + world.residual("a"), wanted, atol=1e-5, rtol=0.0)


def test_another_compressor_for_a_round_is_that_of_both_ways() -> None:
    worlds = [
        World(2, TopK(1 / 64), collective="sharded", **options)
        for options in ({"downlink": TopK(1 / 4)}, {})
    ]
    means = [
        world.average(world.gradients("af"), compress=TopK(1 / 32))[0]["a"] for world in worlds
    ]
    assert torch.equal(*means)
    assert worlds[0].exchanges[0].stats() == worlds[1].exchanges[0].stats()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"downlink": 1 / 16}, "downlink must be a name or a mapping, got 0.0625"),
        ({"downlink": TopK(0.1), "collective": "all_gather"}, "goes with collective='sharded'"),
        ({"downlink": PermK()}, "PermK gives each rank its own elements"),
        ({"downlink": RandomK(0.1)}, "cannot be used with error feedback"),
        ({"downlink": "topq"}, "did you mean 'topk'"),
        ({"downlink": {"density": 0.1}}, "downlink as a mapping needs its name under 'type'"),
        ({"downlink": {"type": "topk", "densty": 0.1}}, "did you mean 'density'"),
    ],
)
def test_a_downlink_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExchangeSettings.of(TopK(1 / 64), **options)


def test_a_downlink_can_be_named() -> None:
    block = {"compressor": "topk", "downlink": "topk:density=1/4"}
    assert ExchangeSettings.from_dict(block).downlink == TopK(0.25)


def test_stats_count_what_the_collectives_are_given() -> None:
    world = World(3, TopK(0.1), collective="all_gather")
    moved = []
    perform = world.simulated._perform
    world.simulated._perform = lambda requests: (  # type: ignore[method-assign]
        moved.append(requests[0].payload) or perform(requests)
    )
    world.average(world.gradients("abc"))
    world.average(world.gradients("abc"))
    payloads = [p for p in moved if isinstance(p, torch.Tensor)]
    stats = world.exchanges[0].stats()
    assert stats["steps"] == 2
    assert stats["bytes_sent"] == stats["bytes_received"] == sum(2 * p.nbytes for p in payloads)
    assert stats["bytes_uncompressed"] == 2 * (2 * 2 * (2 * 64 * 40 + 33) * 4 // 3)
    assert stats["compression_ratio"] == stats["bytes_uncompressed"] / stats["bytes_sent"]
    residuals = [world.exchanges[0].memory.state_dict()[n] for n in "ac"]  # type: ignore[union-attr]
    assert stats["residual_norm"] == pytest.approx(float(torch.cat(residuals).norm()))


def test_another_ranks_state_is_refused() -> None:
    world = World(2, TopK(0.1))
    world.average(world.gradients("a"))
    states = [exchange.state_dict() for exchange in world.exchanges]
    with pytest.raises(ValueError, match="saved with rank 0, but this is rank 1"):
        world.exchanges[1].load_state_dict(states[0])
    with pytest.raises(ValueError, match="saved with world_size 2, but this is world_size 3"):
        World(3, TopK(0.1)).exchanges[0].load_state_dict(states[0])
    with pytest.raises(ValueError, match="saved with a memory"):
        World(2, CountSketch(0.1)).exchanges[0].load_state_dict(states[0])


def test_exchanges_of_one_memory_or_the_same_settings_have_memories_of_their_own() -> None:
    memory = ErrorFeedback(bits=16)
    one = Exchange(TopK(0.1), memory)
    several = [Exchange(TopK(0.1), memory), Exchange(one.settings), Exchange(one.settings)]
    assert len({id(m) for m in (memory, *(e.memory for e in (one, *several)))}) == 5
    assert {repr(e) for e in several} == {repr(one)}
    with pytest.raises(ValueError, match="change them with dataclasses"):
        Exchange(one.settings, seed=3)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"seed": 7}, "seed is 0 on ranks 0, 1, 7 on rank 2"),
        ({"compressor": TopK(density=0.2)}, "density is 0.1 on ranks 0, 1, 0.2 on rank 2"),
        ({"compressor": Sign()}, "compressor is 'TopK' on ranks 0, 1, 'Sign' on rank 2"),
        ({"memory": None}, "memory is 'ErrorFeedback(bits=32)' on ranks 0, 1, 'None'"),
        ({"collective": "sharded"}, "collective is 'auto' on ranks 0, 1, 'sharded' on rank 2"),
    ],
    ids=str,
)
def test_ranks_that_are_configured_differently_all_say_so(
    other: dict[str, object], expected: str
) -> None:
    simulated = Simulated(3)
    common = {"compressor": TopK(density=0.1)}
    exchanges = [
        Exchange(transport=t, **(common | other if rank == 2 else common))  # type: ignore[arg-type]
        for rank, t in enumerate(simulated)
    ]
    gradient = torch.ones(64, 64)
    for rank in range(3):
        rounds = [e.round({"a": gradient}) for e in exchanges]
        requests = [next(r) for r in rounds]
        with pytest.raises(ConfigMismatchError, match="ranks are configured differently") as caught:
            rounds[rank].send([request.payload for request in requests])
        assert expected in str(caught.value)
    assert gradient.eq(1).all(), "nothing may be exchanged"


@pytest.mark.parametrize(
    "exchange",
    [
        Exchange(TopK(density=0.1), transport=Simulated(2)[0]),
        Exchange(Identity(bits=16), min_numel=1, min_ndim=1, seed=3, granularity="bucket"),
        Exchange(Sign(), memory=ErrorFeedback(bits=4, decay=1 / 3, stochastic=True)),
        Exchange(Sign(), memory=MomentumCorrection(2 / 3), collective="sharded"),
        Exchange(Sign(), memory=Differences(), exempt_bits=16),
        Exchange(Sign(), collective="hierarchical", ranks_per_node=2),
    ],
    ids=str,
)
def test_an_exchange_is_written_as_what_makes_it(exchange: Exchange) -> None:
    assert eval(repr(exchange)).config() == exchange.config()


@pytest.mark.parametrize("compressor", [*WITH_FEEDBACK, *WITHOUT_FEEDBACK], ids=str)
def test_sketches_are_of_buckets_and_all_else_of_parameters(compressor: Compressor) -> None:
    sketches = isinstance(compressor, (CountSketch, SRHT, GaussianSketch))
    made = Exchange(compressor, None)
    assert made.settings.granularity == ("bucket" if sketches else "parameter")
    for asked in ("bucket", "parameter"):
        assert Exchange(compressor, None, granularity=asked).settings.granularity == asked  # type: ignore[arg-type]


@pytest.mark.parametrize("granularity", ["auto", "parameter"])
@pytest.mark.parametrize(
    "sketch", representative([CountSketch(0.1), SRHT(0.1), GaussianSketch(0.1, block_size=8192)])
)
def test_the_noise_of_a_sketch_is_the_same_for_layers_of_small_and_large_gradients(
    sketch: Compressor, granularity: str
) -> None:
    world = World(2, sketch, granularity=granularity)
    gradients = world.gradients("ac")
    for own in gradients:
        own["c"] *= 100
    result = world.average(gradients)[0]
    noise = {n: float((result[n] - mean(gradients, n)).norm()) for n in "ac"}
    assert noise["c"] / noise["a"] == pytest.approx(1 if granularity == "auto" else 100, rel=0.4)


def test_a_world_of_one_works_and_warns() -> None:
    world = World(1, TopK(0.1))
    with pytest.warns(UserWarning, match="world size is 1"):
        world.average(world.gradients("a"))
    assert world.exchanges[0].stats()["bytes_sent"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compressor": "topk"}, "compressor must be a Compressor"),
        ({"memory": "feedback"}, "memory must be None, 'auto' or a Memory"),
        ({"collective": "allreduce"}, "collective must be one of auto, all_reduce"),
        ({"collective": "all_reduce"}, "payloads of TopK cannot be summed; choose from auto, all"),
        ({"granularity": "layer"}, "granularity must be one of auto, parameter, bucket"),
        ({"compressor": PermK(), "collective": "sharded"}, "gives each rank its own elements"),
        ({"min_numel": 0}, "min_numel must be an integer of at least 1"),
        ({"min_ndim": 0}, "min_ndim must be an integer of at least 1"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"compressor": SRHT(), "memory": ErrorFeedback()}, "not contractive"),
        ({"compressor": RandomK(), "memory": ErrorFeedback()}, r"RandomK\(unbiased=False\)"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_at_once(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Exchange(**({"compressor": TopK()} | arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(64, 64, dtype=torch.int32),
        torch.zeros(64, 64, dtype=torch.complex64),
        torch.zeros(64, 64).to_sparse(),
    ],
    ids=lambda t: f"{t.dtype}-{t.layout}",
)
def test_gradients_that_are_not_dense_floats_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="dense and of a floating-point dtype"):
        next(World(2, TopK()).exchanges[0].round({"a": tensor}))


def test_nothing_to_average_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to average"):
        next(World(2, TopK()).exchanges[0].round({}))


def test_ranks_that_diverge_are_reported_not_hung() -> None:
    world = World(2, TopK(0.1))
    gradients = world.gradients("a")
    world.average(gradients)
    rounds = [e.round(g) for e, g in zip(world.exchanges, gradients, strict=True)]
    rounds[1] = world.exchanges[1].round(gradients[1], compress=False)
    with pytest.raises(RuntimeError, match="ranks diverged"):
        world.simulated.run(rounds)
