"""The properties of `properties.py`, on the same few examples every time; `make soak` goes on for longer."""

from __future__ import annotations

import pytest
from bad_inputs.properties import PROPERTIES
from hypothesis import HealthCheck, given, settings

EXAMPLES = {name: 25 if "config" in name else 60 for name in PROPERTIES}


@pytest.mark.parametrize("name", PROPERTIES)
def test_it_holds(name):
    check, drawn = PROPERTIES[name]
    quiet = settings(
        max_examples=EXAMPLES[name],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    quiet(given(*drawn)(check))()
