"""The epsilons and step counts that papers print, from the settings that give them."""

import math

import pytest

from comm_hooks.optim.private.accounting import (
    OPACUS_ORDERS,
    GaussianEvent,
    PLDAccountant,
    RDPAccountant,
    max_steps,
)

# DP-MicroAdam, Table 8: CIFAR-10, 45,000 samples, batches of 4096, the last step with epsilon < 8.
MICRO_ADAM = {"sample_rate": 4096 / 45000}
TABLE_8 = {3.0: 2480, 4.0: 4556, 5.0: 7227, 6.0: 10492, 8.0: 18798}

# TensorFlow Privacy's orders, made finer by AdaDPS's authors.
ADADPS_ORDERS = [
    *(1.1, 1.2, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.25, 3.5, 3.75, 4.0, 4.25, 4.5, 4.75),
    *(half / 2 for half in range(10, 128)),
    *(128, 256, 512),
]

# name: orders, sigma, q, steps, delta, as printed, ours.  AdaDPS: n samples, batches of 64, delta
# = 1 / n, ceil(epochs n / 64) steps; Tables 5 and 6 and section 6.  Epochs are from the authors'
# scripts, but those marked * are what the printed figure needs (the script for StackOverflow says
# 50, which gives 0.87).  DP-AdamBC: delta and q as in the authors' code, 1 / the number of batches
# where not said otherwise; Appendix D; CIFAR-10 has 6 whole batches of 8192.
PRINTED = {
    "AdaDPS, IMDB, BoW, 32 epochs": ("adadps", 1.0, 64 / 25000, 12500, 1 / 25000, "1.5", 1.5126),
    "AdaDPS, IMDB, LSTM, 100 epochs*": ("adadps", 1.0, 64 / 25000, 39063, 1 / 25000, "2.8", 2.8056),
    "AdaDPS, StackOverflow, 42 epochs*": (
        *("adadps", 0.95, 64 / 246092, math.ceil(42 * 246092 / 64), 1 / 246092),
        *("0.84", 0.8397),
    ),
    "AdaDPS, autoencoder, 80 epochs": ("adadps", 1.0, 64 / 60000, 75000, 1 / 60000, "1.6", 1.5919),
    "AdaDPS, autoencoder, low noise*": ("adadps", 0.75, 64 / 60000, 75000, 1 / 60000, "3", 3.0152),
    "AdaDPS, MNIST classes, 50 epochs*": (
        *("adadps", 1.0, 64 / 60000, 46875, 1 / 60000),
        *("1.25", 1.2504),
    ),
    "AdaDPS, federated, 40 rounds": ("adadps", 0.3, 20 / 400, 40, 0.0025, "34", 34.1711),
    "DP-AdamBC, CIFAR-10, 39 epochs*": ("opacus", 2.0, 1 / 6, 6 * 39, 1e-5, "7.1", 7.0991),
    "DP-AdamBC, SNLI, 5 epochs": ("opacus", 0.4, 1 / 2146, 5 * 2146, 1 / 2146, "7.0", 6.9882),
}


@pytest.mark.parametrize("orders", [OPACUS_ORDERS, None], ids=["opacus", "default"])
@pytest.mark.parametrize("sigma", TABLE_8)
def test_dp_micro_adams_table_8(sigma, orders):
    accountant = RDPAccountant() if orders is None else RDPAccountant(orders=orders)
    ours = max_steps(8.0, 1e-5, noise_multiplier=sigma, accountant=accountant, **MICRO_ADAM)
    # With sigma = 8 the authors stopped at the end of an epoch, 5 steps early.
    assert 0 <= ours - TABLE_8[sigma] <= (6 if sigma == 8 else 0)


# sigma, q, delta, steps as printed, ours.  Table 9, ImageNet without the 10,000 images that De et
# al. hold back, who print 71,589; Table 10, fine-tuning on CIFAR-10 and CIFAR-100.
TABLES_9_AND_10 = [
    (2.5, 16384 / 1_271_167, 8e-7, 71_528, 71_587),
    (1.56, 4096 / 45000, 1e-5, 539, 536),
    (2.0, 4096 / 45000, 1e-5, 994, 998),
]


@pytest.mark.parametrize(("sigma", "q", "delta", "printed", "expected"), TABLES_9_AND_10)
def test_dp_micro_adams_tables_9_and_10(sigma, q, delta, printed, expected):
    ours = max_steps(8.0, delta, noise_multiplier=sigma, sample_rate=q)
    assert ours == expected
    assert ours == pytest.approx(printed, rel=0.006)


@pytest.mark.parametrize("name", PRINTED)
def test_printed_epsilons(name):
    orders, sigma, q, steps, delta, printed, expected = PRINTED[name]
    accountant = RDPAccountant(orders=OPACUS_ORDERS if orders == "opacus" else ADADPS_ORDERS)
    epsilon = accountant.epsilon([GaussianEvent(sigma, q, steps)], delta)
    assert epsilon == pytest.approx(expected, abs=1e-4)
    decimals = len(printed.partition(".")[2])
    assert f"{epsilon:.{decimals}f}" == printed


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [3.0, 8.0])
def test_pld_lasts_for_an_eighth_more_steps(sigma):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    accountant = PLDAccountant()
    steps = max_steps(8.0, 1e-5, noise_multiplier=sigma, accountant=accountant, **MICRO_ADAM)
    assert 1.12 < steps / TABLE_8[sigma] < 1.15


@pytest.mark.slow
def test_shares_of_the_noise_and_a_nonlinear_compressor_per_rank():
    """What each of N messages costs: sigma / sqrt(N), whatever the sum of the noise is."""
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    for ranks, expected in [(1, 7.43), (4, 18.3), (8, 30.7)]:
        history = [GaussianEvent(5 / math.sqrt(ranks), steps=7227, **MICRO_ADAM)]
        assert PLDAccountant().epsilon(history, 1e-5) == pytest.approx(expected, rel=5e-3)
