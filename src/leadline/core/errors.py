"""The exception tree and the exit code each branch ends a command with.

    LeadlineError            1  something failed
    |-- UsageError           2  the caller asked for something that cannot be
    |-- IntegrityError       1  a hash, a count or a chain does not match
    |-- UnsafePackError      1  a pack holds a secret, a link or a path that escapes
    |-- DiskSpaceError       1  not enough room, found before or during a write
    |-- DataError            1  tokens, shards or text that must not be trained on
    |-- LockError            1  a lock that exists, differs or is not backed by its ledger
    |-- EnvironmentUnfitError 1 the machine cannot run what was asked
    |-- ProbeError           1  a measurement could not be taken
    `-- NonFiniteStateError  1  weights or optimizer state hold NaN or Inf

A gate that is red is a result and no error; its command leaves with code 3.

A class exists only where a caller acts differently. Every message is one
sentence that says what was checked, the value seen, the value wanted, and
what to do.
"""


class LeadlineError(Exception):
    """Base of every error leadline raises on purpose; carries an exit code."""

    exit_code = 1


class UsageError(LeadlineError):
    """The request itself is wrong: a bad option, config key or combination."""

    exit_code = 2


class IntegrityError(LeadlineError):
    """Bytes on disk are not the bytes that were recorded."""


class UnsafePackError(LeadlineError):
    """A pack must not be made or opened: secret, link, device file or escaping path."""


class DiskSpaceError(LeadlineError):
    """Too little free space, known before a write or met during one."""


class DataError(LeadlineError):
    """Training data that cannot be used as asked."""


class LockError(LeadlineError):
    """The lock cannot be written, or does not match what it locks."""


class EnvironmentUnfitError(LeadlineError):
    """The machine, driver or wheel cannot run the work."""


class ProbeError(LeadlineError):
    """A measurement failed for a reason other than its own verdict."""


class NonFiniteStateError(LeadlineError):
    """Weights or optimizer state hold NaN or Inf, so they must not replace a usable checkpoint."""
