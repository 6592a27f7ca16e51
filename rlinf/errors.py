"""Errors a person can act on."""


class UserError(ValueError):
    """A mistake the user can fix: the CLI prints it as one line, without a traceback, and exits with status 2."""
