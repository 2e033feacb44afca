"""The options of a schedule: every wrong value is refused with the rule and the nearest legal value."""

import dataclasses
import inspect
import math
import re
from pathlib import Path

import pytest

from slimpipe import SlimPipeOptions

MEASURED = ("attention_flops", "link_bandwidth", "link_latency")


def test_every_option_is_described():
    source = Path(inspect.getfile(SlimPipeOptions)).read_text()
    for field in dataclasses.fields(SlimPipeOptions):
        assert re.search(rf'^    {field.name}: .*\n    """', source, flags=re.MULTILINE), field.name


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"seq_dim": -1}, "SlimPipeOptions.seq_dim = -1: it must count from the front; nearest legal value: 0"),
        ({"kernel": "flash"}, "kernel = 'flash': it must be one of auto, .*; nearest legal value: 'flash_attn'"),
        ({"context_exchange": "onn"}, "context_exchange = 'onn': .* auto, on, off; nearest legal value: 'on'"),
        ({"exchange_granularity": 0}, "exchange_granularity = 0: it must be at least one token; nearest .*: 1"),
        ({"exchange_max_slices": -1}, "exchange_max_slices = -1: it must be at least 0; nearest legal value: 0"),
        *(
            ({name: value}, f"SlimPipeOptions.{name} = {value}: it must be positive and finite.*; nearest .*: None")
            for name in MEASURED
            for value in (0, -1.5, math.inf, math.nan)
        ),
    ],
)
def test_a_wrong_value(values, said):
    with pytest.raises(ValueError, match=said):
        SlimPipeOptions(**values)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("seq_dim", 1.0, "int, for example 1"),
        ("context_exchange", True, "str, for example 'auto'"),
        ("exchange_granularity", "128", "int, for example 128"),
        ("exchange_granularity", True, "int, for example 128"),
        ("exchange_max_slices", None, "int, for example 16"),
        ("measure_memory", 1, "bool, for example False"),
        ("sliced_kwargs", ["positions"], "tuple"),
        *((name, value, "float or None, for example 1000000000.0") for name in MEASURED for value in ("1e9", True)),
    ],
)
def test_a_wrong_type(name, value, wanted):
    with pytest.raises(TypeError, match=re.escape(f"SlimPipeOptions.{name} got {value!r} of type") + f".*{wanted}"):
        SlimPipeOptions(**{name: value})


def test_right_values():
    for name in MEASURED:
        for value in (None, 1, 2.5e-9):
            assert getattr(SlimPipeOptions(**{name: value}), name) == value
    options = SlimPipeOptions(context_exchange="off", exchange_granularity=1, exchange_max_slices=0)
    assert (options.context_exchange, options.exchange_granularity, options.exchange_max_slices) == ("off", 1, 0)
