"""Exit codes of Radixgrove's processes; documented in docs/configuration.md."""

from radixgrove.protocol.errors import StartFailed

OK = 0
FAILED = 1  # the work itself failed: a start, a check, a child
USAGE = 2  # unknown flag, wrong setting
UNREACHABLE = 3  # no answer from the given URL, or it refuses the key
STUCK = 4  # a rank or a frontend of a worker was stuck and has been killed
MODEL = 5  # the model's files are not there, or cannot be served
INTERRUPTED = 130


def of(error: StartFailed) -> int:
    """The code that the error has as `code`, of what cannot start, or go on."""
    code: int = getattr(error, "code", FAILED)
    return code
