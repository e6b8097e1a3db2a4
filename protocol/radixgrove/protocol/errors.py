"""The families of Radixgrove's own exceptions; each class is defined beside what raises it."""

from __future__ import annotations


class RadixgroveError(Exception):
    """Root of every exception that Radixgrove defines.

    RadixgroveError
    ├── ApiError                     an answer with an error status
    ├── InvalidInput                 what a person, a file, a client or a model gives
    │   ├── ModelError
    │   │   ├── DamagedFileError
    │   │   └── MemoryShortage
    │   ├── TokenizerError
    │   │   └── GivenTemplateError
    │   ├── ConstraintError
    │   │   ├── UnenforceableError
    │   │   └── ToolError
    │   ├── TemplateRefusal
    │   ├── TemplateFailure
    │   ├── KeyFileError
    │   ├── RegistrationRefused
    │   ├── UnsupportedRanks
    │   ├── InvalidSettings
    │   │   ├── InvalidEngine
    │   │   │   ├── InvalidOverrides
    │   │   │   └── UnsupportedShape
    │   │   └── InvalidRouter
    │   ├── CannotMerge
    │   ├── ConfigurationError
    │   ├── ConfigurationUsage
    │   ├── WorkloadError
    │   ├── UnknownFormatError
    │   ├── QuantizationError
    │   ├── LiteralError
    │   ├── Ended
    │   └── Malformed
    ├── StartFailed                  a process cannot start, or go on
    │   ├── CodedStartFailed         and there is an exit code that says why
    │   │   ├── AgentError
    │   │   │   └── UnusableGroup
    │   │   ├── RouterStartError
    │   │   ├── ClusterError
    │   │   ├── BindingError
    │   │   └── UnusableSettings
    │   ├── NoPrivateDirectory
    │   ├── ChildFailed
    │   ├── TaskEnded
    │   └── DemoModelError
    ├── PeerError                    another process refuses, is silent or gone
    │   ├── RedisUnavailable
    │   │   ├── WrongType
    │   │   └── UsersRefused
    │   ├── RedisRefused
    │   │   └── RedisUnsuitable
    │   ├── KubeError
    │   ├── FetchError
    │   ├── RankMissing
    │   ├── JoinRefused
    │   ├── ChannelError
    │   ├── AnswerLate
    │   ├── ConnectFailed
    │   │   └── NoResources
    │   ├── AnswerBroke
    │   ├── AnswerTooLarge
    │   ├── NoAnswer
    │   ├── AttemptFailed
    │   ├── StreamBroke
    │   ├── IndexLost
    │   ├── ClientDisconnected
    │   ├── Unreachable
    │   └── RequestRefused
    ├── LibraryError                 a library cannot serve on this machine
    │   ├── CublasLtError
    │   └── FlashInferUnavailable
    ├── Interrupted                  work that is given up, or to be done again
    │   ├── Abandoned
    │   ├── NotLeading
    │   └── Incomplete
    └── Defect                       an invariant of the program is broken
        ├── PoolError
        ├── InvariantError
        └── IllegalTransition
    """


class InvalidInput(RadixgroveError):
    """A file, setting or request cannot be used; the message names it, its value, the remedy."""


class StartFailed(RadixgroveError):
    """A process cannot start, or go on; the message says what to change."""


class PeerError(RadixgroveError):
    """Another process or server refuses, does not answer in time, or is gone."""


class LibraryError(RadixgroveError):
    """An optional library cannot serve on this machine."""


class Interrupted(RadixgroveError):
    """Work that is given up, or is to be done again; no fault."""


class Defect(RadixgroveError):
    """An invariant of Radixgrove is broken: a fault of the program, never of a client."""
