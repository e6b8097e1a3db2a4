"""What rank 0 and the other ranks of a group say to each other, as msgpack in channels' frames."""

from __future__ import annotations

import msgspec

from radixgrove.worker.parallel.member import StorePlace
from radixgrove.worker.plan import StepPlan, StepResult

# Each end says that it lives, from a thread of its own.
BEAT_SECONDS = 0.5
# A rank that says nothing for so long is frozen, or cut off; longer while it loads and compiles.
SILENCE_SECONDS = 5.0
START_SILENCE_SECONDS = 60.0
SEND_SECONDS = 10.0


class Returned(msgspec.Struct, array_like=True):
    """What a collected step sampled in the last stage, a token a row, for the stages before it."""

    rows: list[int]
    tokens: list[int]


class Launch(msgspec.Struct, array_like=True, tag=True):
    plan: StepPlan
    returned: list[Returned] = []  # to be taken back first


class Forward(msgspec.Struct, array_like=True, tag=True):
    """Up to the logits; a `Sample` follows."""

    plan: StepPlan
    returned: list[Returned] = []


class Sample(msgspec.Struct, array_like=True, tag=True):
    """The rest of the step that was forwarded last, under rank 0's masks."""

    masked: list[int] = []
    masks: bytes = b""  # int32, as many words for each of `masked`


class Alive(msgspec.Struct, array_like=True, tag=True):
    """Rank 0 runs."""


class End(msgspec.Struct, array_like=True, tag=True):
    """The group ends in order."""


Step = Launch | Forward | Sample
Order = Step | StorePlace | Alive | End


class Progress(msgspec.Struct, array_like=True, tag=True):
    """A rank's heartbeat."""

    orders: int  # steps' orders that it has carried out
    waits: bool  # for another rank, at this moment
    ended: int = 0  # steps that its device has done


class Sampled(msgspec.Struct, array_like=True, tag=True):
    """From the last stage of a pipeline."""

    result: StepResult


class Compared(msgspec.Struct, array_like=True, tag=True):
    """For debugging: digests of what a rank ran and drew in a step."""

    step_id: int
    plan: bytes
    samples: bytes


class Failed(msgspec.Struct, array_like=True, tag=True):
    """A rank's last words."""

    error: str


Report = Progress | Sampled | Compared | Failed
