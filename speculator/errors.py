"""What a user can do something about: shown as one line, without a traceback."""


class UserError(Exception):
    """Wrong input. The message says what is wrong, where, and what to do."""
