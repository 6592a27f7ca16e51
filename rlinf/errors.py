"""Errors the command line explains in a line instead of a traceback."""


class UserError(ValueError):
    """A mistake the user can fix: exit status 2."""


class NotInstalledError(UserError):
    """An optional package is missing."""


class SimulatorError(RuntimeError):
    """A simulator kept failing, so the run cannot go on: exit status 3."""


class WorkerDiedError(RuntimeError):
    """A process of the run is gone, so the run cannot go on: exit status 5."""
