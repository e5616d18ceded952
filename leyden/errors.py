"""Every error that leyden raises on purpose.

    LeydenError
    ├── ConfigError        a flag or a config.json value that cannot be used      -> exit code 2
    ├── CheckpointError    a missing, unexpected or damaged file or tensor        -> exit code 1
    ├── RequestError       a request that cannot be served as asked               -> HTTP 4xx
    │   └── Overloaded     no room for another request now                        -> HTTP 429/503
    └── EngineDead         the engine stopped; nothing can be generated any more  -> HTTP 503

A message says what was expected, what was found and, where it is known, what to do.
"""


class LeydenError(Exception):
    """Base of the tree; never raised itself."""


class ConfigError(LeydenError):
    """A flag or a configuration value that is unknown, malformed or contradicts another."""


class CheckpointError(LeydenError):
    """A checkpoint that does not hold what its config promises."""


class RequestError(LeydenError):
    """A request that cannot be served; `param` names the field at fault (None when no single field is)."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status


class Overloaded(RequestError):
    """The queue is full or the server is draining; `retry_after` is in seconds."""

    def __init__(self, message: str, status: int = 429, retry_after: int = 1):
        super().__init__(message, None, status)
        self.retry_after = retry_after


class EngineDead(LeydenError):
    """The engine process ended; the message holds the reason if it is known."""
