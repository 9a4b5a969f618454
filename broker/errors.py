"""The one family of errors that rolloutbus raises.

Each message names what went wrong, where, and what to do next. What a trainer would retry is also a `ConnectionError`
or a `TimeoutError`; what is a caller's mistake is also a `ValueError` or a `TypeError`, so callers need not know our
names.
"""

from __future__ import annotations


class RolloutBusError(Exception):
    """Anything that rolloutbus raises on purpose."""


class ConfigError(RolloutBusError, ValueError):
    """A configuration is wrong; the message carries the full key path."""


class RowError(RolloutBusError, ValueError):
    """A row, or the batch it stands in, cannot be published as it is."""


class RowTypeError(RolloutBusError, TypeError):
    """A row, or a part of it, has the wrong type."""


class RouteError(RowError):
    """A row's route is missing, mixed inside a group, or hosted by nobody."""


class EncodeError(RolloutBusError, TypeError):
    """A value cannot go on the wire; the message names the row and the path inside it."""


class DecodeError(RolloutBusError, ValueError):
    """A payload is malformed, truncated, or beyond the limits."""


class PayloadTooLargeError(RowError):
    """One encoded row or group is above the configured limit."""


class BrokerError(RolloutBusError):
    """The broker answered with an error that retrying the same call does not mend."""


class BrokerUnavailableError(RolloutBusError, ConnectionError):
    """The broker cannot be reached, or stayed away longer than the caller is willing to wait."""


class BrokerTimeoutError(RolloutBusError, TimeoutError):
    """The broker accepted a command and did not answer in time."""


class BrokerAuthError(BrokerError, PermissionError):
    """Wrong or missing password, or an ACL rule that does not let this role work."""


class BrokerVersionError(BrokerError):
    """The server is older than Redis 7.0 or lacks something that rolloutbus needs."""


class BrokerFullError(BrokerError):
    """The broker is at `maxmemory`; what only frees memory still works, what adds to it has to wait."""


class EmbeddedBrokerError(RolloutBusError, RuntimeError):
    """The embedded server did not start, or its binary is missing."""


class ClientNameTakenError(RolloutBusError, RuntimeError):
    """Another live process holds this client name in this run."""


class OwnershipLostError(RolloutBusError, RuntimeError):
    """Another process took this client name over; what this one says is refused."""


class BatchError(RolloutBusError, RuntimeError):
    """A batch ended in a way its caller must know about."""


class BatchCancelledError(BatchError):
    """The batch was cancelled, here or by an operator."""


class UnknownBatchError(BatchError, LookupError):
    """No such batch on the broker: it was closed, abandoned, or never existed."""


class BooksError(BatchError):
    """published != completed + failed + cancelled: a bug or a tampered broker; the counts are in the message."""


class UnreadableResultError(BatchError):
    """A row's result cannot be unpacked here, or is None. `row_index` is the row's place in the batch."""

    def __init__(self, row_index: int, origin: str, why: str) -> None:
        self.row_index, self.origin, self.why = row_index, origin, why
        super().__init__(f"the result of row {row_index}{origin} {why}")

    def of_row(self, row_index: int) -> UnreadableResultError:
        """The same error for a caller who knows the row by another number."""
        return UnreadableResultError(row_index, self.origin, self.why)


class GroupFailedError(BatchError):
    """A prompt group failed for good and the caller asked for `on_failure="raise"`."""


class NoInstanceError(BatchError, TimeoutError):
    """No live instance of a shard was there to take its groups within the allowed time."""


class UsageError(RolloutBusError, RuntimeError):
    """Something is used where, or as, it cannot be used; the message says what to do instead."""


class ClosedError(RolloutBusError, RuntimeError):
    """The client, batch or worker is closed already."""


class EnvironmentContractError(RolloutBusError, RuntimeError):
    """An environment broke its contract: wrong, foreign, repeated or missing rows, or nothing at all."""


class FleetError(RolloutBusError, RuntimeError):
    """A fleet could not be started, changed or stopped as asked."""
