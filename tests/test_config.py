"""Names and objects."""

import pytest

from comm_hooks import SRHT, ErrorFeedback, TopK
from comm_hooks.config import COMPRESSORS, build, parse_spec
from comm_hooks.exchange import ExchangeSettings


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_name_builds_with_its_defaults(name: str) -> None:
    assert type(build("compressor", name)) is COMPRESSORS[name]


def test_the_fixed_names_are_there() -> None:
    fixed = "count_sketch srht gaussian_sketch topk random_k perm_k sign quantize cocktail dct_topk"
    assert set(fixed.split()) <= set(COMPRESSORS)


def test_options_reach_the_compressor() -> None:
    assert build("compressor", "topk", density=0.01, value_bits=1) == TopK(0.01, value_bits=1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("countsketch", {}, "unknown compressor 'countsketch': did you mean 'count_sketch'?"),
        ("zzz", {}, "unknown compressor 'zzz': known are count_sketch, srht"),
        ("srht", {"density": 0.1}, "unknown option of srht 'density': known are ratio"),
        ("perm_k", {"ratio": 0.1}, "unknown option of perm_k 'ratio': known are none"),
        ("count_sketch", {"ratio": 0.0}, "CountSketch: ratio must lie in \\(0, 1\\], got 0.0"),
        ("gaussian_sketch", {"block_size": 0}, "block_size must be an integer of at least 1"),
        ("topk", {"density": float("nan")}, "TopK: density must lie in .* got nan"),
        ("topk", {"value_bits": 5}, "TopK: value_bits must be one of 1, 2, 3, 4, 16, 32, got 5"),
        ("topk", {"block_size": 70000}, "TopK: block_size must be at most 65536"),
        ("cocktail", {"mask": 0}, "Cocktail: mask must lie in \\(0, 1\\], got 0"),
        ("dct_topk", {"chunk": 0}, "DCTTopK: chunk must be an integer of at least 1, got 0"),
        ("dct_topk", {"chunk": 257}, "DCTTopK: chunk must be at most 256, got 257"),
        ("quantize", {"bits": 3}, "Quantize: bits must be one of 1, 2, 4, 8, got 3"),
    ],
)
def test_bad_configurations_are_refused_with_one_line(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build("compressor", name, **options)
    assert "\n" not in str(caught.value)


def test_memory_by_name() -> None:
    assert isinstance(build("memory", "auto", compressor=TopK()), ErrorFeedback)
    assert build("memory", "auto", compressor=SRHT()) is None
    assert build("memory", "none", compressor=TopK()) is None
    assert build("memory", None, compressor=TopK()) is None
    memory = ErrorFeedback(bits=4)
    assert build("memory", memory, compressor=TopK()) is memory
    with pytest.raises(ValueError, match="unknown memory 'feedback': did you mean"):
        build("memory", "feedback", compressor=TopK())


def test_a_memory_may_be_a_mapping() -> None:
    spec = {"type": "error_feedback", "bits": 4, "decay": 0.5}
    memory = build("memory", spec, compressor=TopK())
    assert repr(memory) == "ErrorFeedback(bits=4, decay=0.5)"
    assert build("memory", {"type": "none"}, compressor=TopK()) is None


def test_an_exchange_from_one_flat_block() -> None:
    settings = ExchangeSettings.from_dict(
        {
            "compressor": "quantize",
            "bits": 8,
            "memory": {"type": "error_feedback", "bits": 16},
            "collective": "all_gather",
            "seed": 3,
            "min_numel": 5,
            "exempt_bits": 16,
            "granularity": "bucket",
        }
    )
    config = settings.as_dict()
    assert config["compressor"] == "Quantize"
    assert config["bits"] == 8
    assert config["memory"] == "ErrorFeedback(bits=16)"
    assert [config[k] for k in ("collective", "seed", "min_numel")] == ["all_gather", 3, 5]
    assert [config[k] for k in ("exempt_bits", "granularity")] == [16, "bucket"]
    assert (
        repr(ExchangeSettings.from_dict({"compressor": "topk"}).memory) == "ErrorFeedback(bits=32)"
    )


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ([], r"ds.json: must be an object with a 'compressor', got \[\]"),
        ({}, "ds.json.compressor: missing; choose from count_sketch, .*, identity$"),
        (
            {"density": 0.1, "compresor": "topk"},
            "ds.json.compressor: missing; .*identity. There is 'compresor': did you mean",
        ),
        (
            {"compressor": "topk", "min_numels": 1},
            "ds.json.min_numels: .* did you mean 'min_numel'",
        ),
        (
            {"compressor": ["topk"]},
            r"compressor must be a name or a mapping, got \['topk'\]",
        ),
        ({"compressor": "top_k"}, "ds.json.compressor: unknown compressor 'top_k': did you mean"),
        (
            {"compressor": "topk", "densty": 1},
            "ds.json.densty: unknown setting with topk 'densty': did you mean 'density'?",
        ),
        ({"compressor": "topk", "density": 2}, "ds.json: TopK: density .* got 2"),
        ({"compressor": "topk", "memory": "errorfeedback"}, "ds.json.memory: unknown memory"),
        (
            {"compressor": "topk", "memory": {"bits": 4, "typ": "error_feedback"}},
            "ds.json.memory: .* needs its name .* There is 'typ': did you mean 'type'",
        ),
        (
            {"compressor": "topk", "memory": {"type": "error_feedback", "bit": 4}},
            "ds.json.memory: unknown option of error_feedback 'bit': did you mean 'bits'?",
        ),
        ({"compressor": "sign", "collective": "all_reduce"}, "ds.json: Exchange: collective"),
        (
            {"compressor": "count_sketch", "memory": "error_feedback"},
            "ds.json: CountSketch.* cannot be used with error feedback",
        ),
    ],
)
def test_bad_blocks_name_the_place(block: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ExchangeSettings.from_dict(block, path="ds.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "name", "options"),
    [
        ("topk", "topk", {}),
        (
            "topk:density=1/64:value_bits=1:overlap=1e-2",
            "topk",
            {"density": 1 / 64, "value_bits": 1, "overlap": 0.01},
        ),
        (
            "sign:block_size=none:scale=rms:x=true",
            "sign",
            {"block_size": None, "scale": "rms", "x": True},
        ),
        (
            "topk:downlink=topk:downlink.density=1/4",
            "topk",
            {"downlink": {"type": "topk", "density": 0.25}},
        ),
        ({"type": "quantize", "bits": 4}, "quantize", {"bits": 4}),
    ],
)
def test_text_and_mappings_specify_the_same(
    spec: object, name: str, options: dict[str, object]
) -> None:
    assert parse_spec(spec) == (name, options)
    assert parse_spec({"type": name, **options}) == (name, options)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("topk:density", "compressor 'topk:density': options are written topk:option=value, got"),
        ("topk:=4", "options are written topk:option=value"),
        ({"typ": "topk"}, "needs its name under 'type'.* There is 'typ': did you mean 'type'"),
        ({"type": ["topk"]}, "compressor must have a name of text under 'type', got"),
        (3.5, "compressor must be a name or a mapping, got 3.5"),
    ],
)
def test_what_is_no_specification_is_refused(spec: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_spec(spec, "compressor")
