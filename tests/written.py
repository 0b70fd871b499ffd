"""A `Writing` from the settings that a test gives by name."""

from dataclasses import fields
from typing import Any

from data.writing import Writing


def writing_of(settings: dict[str, Any]) -> Writing:
    """Take the fields of a `Writing` out of some settings."""
    return Writing(**{field.name: settings.pop(field.name) for field in fields(Writing) if field.name in settings})
