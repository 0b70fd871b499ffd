"""Recurrent layers of the target: their states, exact rollback, and transformers' recurrences."""
