"""Exit codes of Radixgrove's processes; documented in docs/configuration.md."""

from radixgrove.protocol.errors import StartFailed

OK = 0
FAILED = 1  # the work itself failed: a start, a check, a child
USAGE = 2  # unknown flag, wrong setting
UNREACHABLE = 3  # no answer from the given URL, another server's, or it refuses the key
STUCK = 4  # a rank or a frontend of a worker was stuck and has been killed
MODEL = 5  # the model's files are not there, or cannot be served
INTERRUPTED = 130


class CodedStartFailed(StartFailed):
    """What cannot start, or go on, and the exit code that says so."""

    code: int = FAILED

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


def of(error: StartFailed) -> int:
    """The exit code for a start that failed."""
    return error.code if isinstance(error, CodedStartFailed) else FAILED
