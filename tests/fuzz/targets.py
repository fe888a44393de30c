"""All targets of the fuzzer, by name, and how many inputs each gets."""

from tests.fuzz import decoders, states, texts
from tests.fuzz.fuzzing import Target

_LEDGER = (
    *texts.JSON,
    *(b'"ledger"', b'"run"', b'"settings"', b'"noise_multiplier"', b'"sample_rate"', b'"steps"'),
    *(b'"delta"', b'"exchange"', b'"compressor"', b'"version"'),
)

TARGETS = {
    target.name: target
    for target in (
        Target(decoders.payloads, 60_000),
        Target(decoders.single_payloads, 400_000),
        Target(decoders.places, 250_000),
        Target(decoders.gathered_headers, 100_000),
        Target(decoders.summed_headers, 100_000),
        Target(texts.ledgers, 60_000, _LEDGER),
        Target(texts.exchanges, 5_000),
        Target(texts.compressors, 30_000),
        Target(states.exchange_states, 5_000),
        Target(states.local_rounds_states, 10_000),
        Target(states.rank_files, 20_000),
    )
}
