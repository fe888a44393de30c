"""The study of SAFL: everything at the bytes it should have."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lab.runs import Point
from benchmarks.lab.schedules import cosine
from benchmarks.lab.simulated import train
from benchmarks.lab.training import Client, NamedParameters, Plan
from benchmarks.studies.safl.budget import FAMILIES, make_sketch, nearest
from benchmarks.studies.safl.methods import Study, make_methods, safl_bytes
from benchmarks.studies.safl.peers import PEERS, Given
from comm_hooks.collectives import Transport
from comm_hooks.wire.gathered_header import HEADER_NBYTES
from comm_hooks.wire.summed_header import summed_header_nbytes
from tests.benchmarks.studying import NUMEL, digits, nothing


@given(scale=st.integers(1, 10**6), budget=st.floats(0, 2e6))
def test_nothing_is_nearer_than_the_nearest(scale: int, budget: float) -> None:
    def cost(fraction: float) -> float:
        return 8 + max(1, round(fraction * scale))

    found = nearest(cost, budget)
    assert 0 < found <= 1
    distance = abs(cost(found) - budget)
    wanted = (budget - 8) / scale
    for fraction in (wanted - 0.6 / scale, wanted, wanted + 0.6 / scale, 1e-9, 1.0):
        clamped = min(1.0, max(1e-9, fraction))
        assert distance <= abs(cost(clamped) - budget) + 1e-6


RATIO = 0.02


@pytest.fixture(scope="module")
def curves() -> dict[str, list[Point]]:
    """A short run of everything that the study of SAFL compares."""
    study = Study([digits(5)], Plan(4, 1, 4, 4, cosine, flat=True), 1e-4, amsgrad=True)
    methods = make_methods(
        study, ratios=[RATIO], families=FAMILIES, peers=list(PEERS), local_steps=[1, 2]
    )
    return {f"{m.name} K={m.labels['K']}": m.train({"lr": 0.01}, 0, nothing) for m in methods}


@pytest.mark.slow
def test_everything_is_compared(curves: dict[str, list[Point]]) -> None:
    assert list(curves) == [
        *("fed_opt K=1", "fed_opt K=2"),
        *(f"safl {family} K=1" for family in FAMILIES),
        "safl count_sketch K=2",
        *(f"{name} K=1" for name, peer in PEERS.items() if peer.matches),
        *(f"{name} K=1" for name, peer in PEERS.items() if not peer.matches),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_of_a_sketch_are_its_size(family: str, curves: dict[str, list[Point]]) -> None:
    """8/5 of the sketch of all parameters, one float per client, and a header."""
    width = make_sketch(family, RATIO).payload_nbytes(NUMEL)
    assert width == pytest.approx(4 * RATIO * NUMEL, rel=0.02)
    expected = 8 / 5 * (width + 4 * 5 + summed_header_nbytes(5))
    assert safl_bytes(make_sketch(family, RATIO), NUMEL, 5) == expected
    assert curves[f"safl {family} K=1"][-1].bytes_sent == pytest.approx(4 * expected, abs=4 * 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fetch_sgd", "cocktail_sgd", "cd_adam"])
def test_peers_get_the_bytes_of_safl(name: str, curves: dict[str, list[Point]]) -> None:
    budget = safl_bytes(make_sketch("count_sketch", RATIO), NUMEL, 5)
    assert curves[f"{name} K=1"][-1].bytes_sent / 4 == pytest.approx(budget, rel=0.02)


@pytest.mark.slow
def test_marina_goes_beyond_its_budget_by_its_exact_rounds(
    curves: dict[str, list[Point]],
) -> None:
    sent = [0, *(point.bytes_sent for point in curves["marina K=1"])]
    rounds = [after - before for before, after in itertools.pairwise(sent)]
    assert rounds[0] == pytest.approx(8 / 5 * 4 * NUMEL, rel=0.003)
    budget = safl_bytes(make_sketch("count_sketch", RATIO), NUMEL, 5)
    assert min(rounds) <= budget


@pytest.mark.slow
def test_peers_of_signs_send_a_bit_per_element(curves: dict[str, list[Point]]) -> None:
    assert curves["cd_adam_signs K=1"][-1].bytes_sent / 4 == pytest.approx(
        8 / 5 * NUMEL / 8 + 8 * HEADER_NBYTES, rel=0.05
    )
    # One round of the four is warm-up.
    sent = [point.bytes_sent for point in curves["one_bit_adam K=1"]]
    assert sent[0] == pytest.approx(8 / 5 * 4 * NUMEL, rel=0.003)
    assert sent[1] - sent[0] == pytest.approx(8 / 5 * NUMEL / 8 + 8 * HEADER_NBYTES, rel=0.05)


@pytest.mark.parametrize("ratio", [1e-6, 0.003, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_sketches_of_every_size_can_be_made(family: str, ratio: float) -> None:
    sketch = make_sketch(family, ratio)
    vector = torch.ones(3000)
    payload = sketch.compress(vector, key=1)
    assert payload.numel() == pytest.approx(max(1, ratio * 3000), rel=0.05)
    assert sketch.decompress(payload, 3000, key=1).isfinite().all()


@pytest.mark.parametrize(
    "name", [pytest.param(p, marks=[pytest.mark.slow] * (p != "marina")) for p in PEERS]
)
def test_all_clients_end_with_one_model(name: str) -> None:
    """`train` judges that of rank 0; here the mean over all, which other models would change."""
    task, plan = digits(3), Plan(4, 1, 4, 2, cosine, flat=True)
    fitted = PEERS[name].fit(Given(NUMEL, 3, 4, budget=5e3, weight_decay=1e-4))

    def build(parameters: NamedParameters, transport: Transport) -> Client:
        return fitted.make(parameters, transport, {"lr": 0.01}, 0)

    def judged(parameters: NamedParameters, transport: Transport) -> Client:
        return replace(build(parameters, transport), agrees=False)

    of_one = train(task, build, plan, 0, nothing)
    of_all = train(task, judged, plan, 0, nothing)
    for one, mean in zip(of_one, of_all, strict=True):
        assert mean.loss == pytest.approx(one.loss, rel=1e-12)
