"""Every error that a user can cause or meet, in one tree.

    RequantError                 exit  1  (never raised itself)
    |- UsageError                exit  2  a flag or an argument
    |- ManifestError             exit  2  one or many faults in a manifest, each with its place
    |- SourceError               exit  3  the source checkpoint (or a finished output) is not what it should be
    |- LockError                 exit  3  source, manifest or tool changed between runs, or another run holds the output
    |- IncompleteError           exit  4  the conversion stopped before its end and can be resumed
    |- NotSignedOffError         exit  5  converted and judged, and a required gate did not pass
    |- EnvironmentFault          exit  6  disk, memory, GPU, a missing extra
    `- PublishError              exit  7  the Hub refused or the sign-off does not cover the files

An error says what is wrong, where, and what to do next.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "EnvironmentFault",
    "ExitCode",
    "IncompleteError",
    "LockError",
    "ManifestError",
    "NotSignedOffError",
    "PublishError",
    "RequantError",
    "SourceError",
    "UsageError",
]


class ExitCode(IntEnum):
    """Exit codes of the command line; README.md lists them."""

    OK = 0
    BUG = 1
    USAGE = 2
    SOURCE = 3
    INCOMPLETE = 4
    NOT_SIGNED_OFF = 5
    ENVIRONMENT = 6
    PUBLISH = 7
    INTERRUPTED = 130


class RequantError(Exception):
    """A fault that is the user's to mend: `message` says what, `where` names file and tensor, `hint` what to do."""

    exit_code: ExitCode = ExitCode.BUG

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        self.message = message
        self.where = where
        self.hint = hint
        super().__init__(self.render())

    def render(self) -> str:
        """The error as the user reads it: `where: message`, then what to do on a line of its own."""
        head = f"{self.where}: {self.message}" if self.where else self.message
        return f"{head}\n  -> {self.hint}" if self.hint else head


class UsageError(RequantError):
    """A wrong flag or argument."""

    exit_code = ExitCode.USAGE


class ManifestError(RequantError):
    """All faults of a manifest at once; `message` holds one rendered fault after the other."""

    exit_code = ExitCode.USAGE


class SourceError(RequantError):
    """The checkpoint on disk is damaged, incomplete or of a kind that cannot be read."""

    exit_code = ExitCode.SOURCE


class LockError(RequantError):
    """What is on disk no longer is what the lock or another run says."""

    exit_code = ExitCode.SOURCE


class IncompleteError(RequantError):
    """The conversion stopped before its end; the journal allows it to go on."""

    exit_code = ExitCode.INCOMPLETE


class NotSignedOffError(RequantError):
    """The output exists and was judged, and a required gate failed or did not run."""

    exit_code = ExitCode.NOT_SIGNED_OFF


class EnvironmentFault(RequantError):  # noqa: N818  EnvironmentError is the builtin OSError
    """The machine lacks something: disk space, a GPU, a package."""

    exit_code = ExitCode.ENVIRONMENT


class PublishError(RequantError):
    """Publishing was refused, here or by the Hub."""

    exit_code = ExitCode.PUBLISH
