"""What pages say of studies is what their records hold."""

import json
from typing import Any

import pytest

from benchmarks.lab.runs import Point, mean_curve
from benchmarks.studies.convergence.__main__ import exponent
from benchmarks.studies.quadratics import SPECTRA
from tests.docs.pages import ROOT

# Records and pages change together: compared before a release.
pytestmark = pytest.mark.slow

MEASUREMENTS = (ROOT / "docs/measurements.md").read_text()


def record_of(study: str, folder: str | None = None) -> Any:
    record = json.loads((ROOT / f"benchmarks/results/{folder or study}/{study}.json").read_text())
    assert record.get("complete", True)
    return record


def rows_after(begin: str) -> list[list[str]]:
    """Return the cells of the first table after a text, without its head."""
    _, found, section = MEASUREMENTS.partition(begin)
    assert found, begin
    lines = section[section.index("\n| ") + 1 :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def in_percent(method: Any) -> str:
    return f"{100 * method['mean_error']:.1f}{'†' * method['lr_is_at_edge']}"


SAFL = {
    "SAFL, Count-Sketch": ("safl count_sketch", 1),
    "SAFL, SRHT": ("safl srht", 1),
    "SAFL, Gaussian sketch": ("safl gaussian_sketch", 1),
    "SAFL, Count-Sketch, K = 5": ("safl count_sketch", 5),
    "CD-Adam, top-k": ("cd_adam", 1),
    "CocktailSGD": ("cocktail_sgd", 1),
    "FetchSGD": ("fetch_sgd", 1),
    "MARINA, rand-k": ("marina", 1),
}


def test_errors_of_safl_and_its_peers() -> None:
    record = record_of("safl")
    methods = {(m["name"], m["labels"]["K"], m["labels"]["ratio"]): m for m in record["methods"]}
    lines = rows_after("SAFL against its peers")
    assert [line[0] for line in lines] == list(SAFL)
    for title, *cells in lines:
        found = [methods[(*SAFL[title], ratio)] for ratio in record["settings"]["ratios"]]
        assert cells == [in_percent(method) for method in found]
    section = " ".join(MEASUREMENTS.partition("SAFL against its peers")[2].split())
    assert f"{record['settings']['rounds']} rounds" in section


DIMENSION = {
    "SAFL, Count-Sketch": "safl",
    "the same without a sketch": "fed_opt",
    "CD-Adam, top-k": "cd_adam",
    "MARINA, rand-k": "marina",
    "FetchSGD": "fetch_sgd",
    "CocktailSGD": "cocktail_sgd",
}


def test_rounds_against_dimensions() -> None:
    record = record_of("safl_dimension")
    limit = record["settings"]["limit"]
    methods = {
        (m["name"], m["labels"]["spectrum"], m["labels"]["parameters"]): m
        for m in record["methods"]
    }
    assert not any(m["lr_is_at_edge"] for (name, *_), m in methods.items() if name != "fetch_sgd")
    spectra = dict(zip(("all equal", "i^-1.5"), SPECTRA, strict=True))
    lines = rows_after("Rounds to a tenth of the loss against")
    assert len(lines) == 12
    for title, eigenvalues, *cells in lines:
        for numel, cell in zip(record["settings"]["numels"], cells, strict=True):
            method = methods[DIMENSION[title], spectra[eigenvalues], numel]
            arrived = [loss is not None and loss <= limit for loss in method["losses"]]
            if all(arrived):
                assert cell == f"{method['mean_loss']:.0f}"
            else:
                assert cell == ("one or two seeds of three" if any(arrived) else "> 1,000")


@pytest.mark.parametrize(
    ("folder", "begin", "task"),
    [
        ("private_optimizers", "**Which optimizer.**", "digits"),
        ("private_verses", "**Words.**", "verses"),
    ],
)
def test_errors_of_private_optimizers(folder: str, begin: str, task: str) -> None:
    record = record_of("private_optimizers", folder)
    assert record["settings"]["task"] == task
    by_name: dict[str, dict[float, Any]] = {}
    for method in record["methods"]:
        by_name.setdefault(method["name"], {})[method["labels"]["sigma"]] = method
    lines = rows_after(begin)
    assert {line[0] for line in lines} == {n for n, found in by_name.items() if None not in found}
    for name, *cells in lines:
        sigmas = record["settings"]["sigmas"]
        assert cells == [in_percent(by_name[name][sigma]) for sigma in sigmas], name


FEDERATED = {
    "AdaDPS: clients precondition by public word frequencies": ["AdaDPS"],
    "DP-FedAdam": ["DP-FedAdam"],
    "preconditioned at the server, after the noise": ["A at the server"],
    "DP-FedAvg": ["DP-FedAvg"],
    "without privacy: FedAdam, AdaS by the clients, FedAvg": ["FedAdam", "AdaS", "FedAvg"],
}


def test_errors_of_private_clients() -> None:
    by_name = {method["name"]: method for method in record_of("private_federated")["methods"]}
    lines = rows_after("**Clients that are private as a whole.**")
    assert [line[0] for line in lines] == list(FEDERATED)
    for title, error, each in lines:
        methods = [by_name[name] for name in FEDERATED[title]]
        assert not any(method["lr_is_at_edge"] for method in methods)
        assert error == ", ".join(f"{100 * method['mean_error']:.1f}" for method in methods)
        errors = ", ".join(f"{100 * e:.1f}" for e in methods[0]["errors"])
        assert each == (errors if len(methods) == 1 else "")


REGRESSION = {"the same after the noise": "A after the noise", "DP^2": "DP2"}


def test_losses_of_the_regression() -> None:
    by_name = {method["name"]: method for method in record_of("private_toy_regression")["methods"]}
    assert not any(method["lr_is_at_edge"] for method in by_name.values())
    *private, plain = rows_after("**Side information.** The regression")
    assert plain[1] == ", ".join(f"{by_name[n]['mean_loss']:.3f}" for n in ("AdaS", "Adam", "SGD"))
    assert {REGRESSION.get(title, title) for title, *_ in private} == {
        name for name, method in by_name.items() if method["labels"]["private"] == "yes"
    }
    for title, mean, each in private:
        method = by_name[REGRESSION.get(title, title)]
        assert mean == f"{method['mean_loss']:.3f}"
        assert each == ", ".join(f"{loss:.3f}" for loss in method["losses"])


FED_LAMB = {
    "Fed-SGD": "fed_sgd",
    "Fed-AMS": "fed_ams",
    'Fed-AMS, `bias_correction=True, bound="client"`': "fed_ams_client",
    "FED-LAMB": "fed_lamb",
    'FED-LAMB, `bound="client"`': "fed_lamb_client",
}


def test_errors_of_fed_lamb() -> None:
    methods = record_of("fed_lamb")["methods"]
    found = {(m["name"], m["labels"]["partition"], m["labels"]["T"]): m for m in methods}
    lines = rows_after("FED-LAMB with 50 clients")
    assert [line[0] for line in lines] == list(FED_LAMB)
    columns = [("iid", 1), ("iid", 10), ("classes", 1), ("classes", 10)]
    for title, *cells in lines:
        name = FED_LAMB[title]
        assert cells == [in_percent(found[name, partition, t]) for partition, t in columns]


FASHION = [
    ("fed_lamb_mlp", "iid", 1),
    ("fed_lamb_mlp", "iid", 5),
    ("fed_lamb_mlp_10_iid", "iid", 10),
    ("fed_lamb_mlp", "classes", 1),
    ("fed_lamb_mlp", "classes", 5),
    ("fed_lamb_mlp_10", "classes", 10),
    ("fed_lamb_cnn_iid", "iid", 1),
    ("fed_lamb_cnn", "classes", 1),
    ("fed_lamb_resnet", "iid", 1),
]


def test_errors_of_fed_lamb_on_fashion_mnist() -> None:
    found = {
        (folder, m["name"], m["labels"]["partition"], m["labels"]["T"]): m
        for folder in {folder for folder, _, _ in FASHION}
        for m in record_of("fed_lamb", folder)["methods"]
    }
    lines = rows_after("On Fashion-MNIST, with 1,200 images")
    assert [line[0] for line in lines] == ["Fed-SGD", "Fed-AMS", "FED-LAMB"]
    for title, *cells in lines:
        expected = [in_percent(found[f, FED_LAMB[title], p, t]) for f, p, t in FASHION]
        assert cells == expected, title


def test_rates_of_convergence() -> None:
    rows = []
    for method in record_of("convergence")["methods"]:
        assert not method["lr_is_at_edge"]
        curves = [[Point(**point) for point in curve] for curve in method["curves"]]
        mean = mean_curve(curves)
        rows.append(
            [
                method["name"],
                str(method["labels"]["clients"]),
                str(method["labels"]["K"]),
                *(f"{point.loss:.4f}" for point in mean),
                f"{exponent(mean):+.2f}",
                f"{max(point.error for curve in curves for point in curve):.2f}",
            ]
        )
    assert rows_after("Mean squared gradients of T rounds") == rows
