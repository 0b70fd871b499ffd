"""Ten minutes of examples that nobody thought of, over the properties of the suite."""

from __future__ import annotations

import time
from functools import wraps

import pytest
from bad_inputs.properties import PROPERTIES
from hypothesis import HealthCheck, given, seed, settings

SECONDS = 600


@pytest.mark.parametrize("name", PROPERTIES)
def test_it_holds(name):
    check, drawn = PROPERTIES[name]
    end, rounds, count = time.monotonic() + SECONDS / len(PROPERTIES), 0, 0

    @wraps(check)
    def counted(**values):
        nonlocal count
        count += 1
        check(**values)

    quiet = settings(max_examples=200, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    while time.monotonic() < end:
        rounds += 1
        seed(rounds)(quiet(given(*drawn)(counted)))()
    print(f"{name}: {count:,} examples", flush=True)
