"""The command, see ``--help``: its options and its table."""

from dataclasses import replace
from typing import Annotated

from benchmarks.lab import tables
from benchmarks.lab.schedules import constant
from benchmarks.lab.training import Plan
from benchmarks.studies import cli
from benchmarks.studies.private_federated.methods import METHODS, build, make_methods
from comm_hooks.optim.private.accounting import GaussianEvent, RDPAccountant


def private_federated(
    clients: Annotated[int, replace(cli.CLIENTS, full=400, quick=40)],
    sample_rate: Annotated[
        float,
        cli.Option("With which each client is drawn for a round.", 0.05, check=cli.fraction),
    ],
    rounds: Annotated[int, cli.Option("Rounds per run.", 40, 8, least=1)],
    local_steps: Annotated[int, cli.Option("A client's steps per round.", 4, least=1)],
    batch: Annotated[int, cli.BATCH],
    sigma: Annotated[float, cli.Option("The noise multiplier.", 0.3, check=cli.positive)],
    norms: Annotated[
        list[float], cli.Option("C, all of which are tried.", "0.3,1,3", "1", check=cli.positive)
    ],
    methods: Annotated[
        list[str], cli.Option("What is compared.", ",".join(METHODS), known=[*METHODS])
    ],
    validation: cli.Validation,
    seeds: Annotated[int, cli.SEEDS],
    tries: Annotated[int, replace(cli.TRIES, full=12)],
    points: Annotated[int, replace(cli.POINTS, full=20)],
    device: cli.Device,
) -> cli.Comparison:
    """Compare preconditioning by clients and at the server, clients being private as a whole.

    Learning rates are constant, and tuned on data apart from those that are reported, with as many
    tries for each method, other settings included; the tuning is not accounted for. Clients and
    noise are drawn anew in every run.
    """
    words = [build(clients, seed, validation) for seed in range(seeds)]
    delta = 1 / clients
    epsilon = RDPAccountant().epsilon([GaussianEvent(sigma, sample_rate, rounds)], delta)
    plan = Plan(rounds, local_steps, batch, min(points, rounds), constant, device=device)
    return cli.Comparison(
        make_methods(methods, words, plan=plan, sample_rate=sample_rate, sigma=sigma, norms=norms),
        rounds,
        f"Held-out error; private: epsilon {epsilon:.2f} at delta {delta:g} for clients; *: the "
        "largest or smallest rate tried",
        lambda outcomes: _COLUMNS,
        lambda outcome: outcome.labels["private"],
        {"task": "verses", "partition": "contiguous", "epsilon": epsilon, "delta": delta},
    )


_COLUMNS: tables.Columns = {
    "method": lambda outcome: outcome.name,
    "private": tables.label("private"),
    "lr": tables.learning_rate,
    "settings": tables.other_settings,
    **tables.JUDGED,
}

app = cli.study(private_federated)

if __name__ == "__main__":
    app()
