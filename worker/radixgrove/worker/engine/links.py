"""The engine's sockets: what frontends and agent send it, and bounded ways to each of them."""

from __future__ import annotations

import msgspec
import zmq

from radixgrove.worker.messages import (
    EngineState,
    Outputs,
    PhaseReport,
    RefusalReason,
    Refused,
    ToAgent,
    ToFrontend,
)
from radixgrove.worker.runtime import Runtime

# Messages that may wait in a socket: seconds of decoding at a thousand steps a second.
SEND_QUEUE = 10_000
# Of a frontend, in its socket and in ours: with 20 log-probabilities a token has half a kilobyte.
MAX_UNREAD_BYTES = 128 << 20
_RECEIVE_QUEUE = 16_384
_LINGER_MS = 1000


class Outlet:
    """A bounded, non-blocking way to one frontend or the agent."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(SEND_QUEUE)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: ToFrontend | ToAgent) -> bytes:
        return self._encoder.encode(message)

    def send(self, message: ToFrontend | ToAgent) -> bool:
        """False: the peer is too far behind, and does not get this message."""
        return self.send_bytes(self.encode(message))

    def send_bytes(self, data: bytes) -> bool:
        """An encoded message, as `send`."""
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


class FrontendOutlet:
    """The way to a frontend, which must hear the end of each of its requests.

    When it falls too far behind, its requests are given up, and it gets their ends once it reads.
    """

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        self._pending_finals: set[str] = set()  # requests that ended while the outlet was full
        self._unread = 0  # bytes that it has not said to have read

    @property
    def is_behind(self) -> bool:
        return bool(self._pending_finals)

    def send(self, message: ToFrontend) -> bool:
        """False: it is too far behind; a message larger than the bound goes alone."""
        data = self._outlet.encode(message)
        if self._unread and self._unread + len(data) > MAX_UNREAD_BYTES:
            return False
        if not self._outlet.send_bytes(data):
            return False
        self._unread += len(data)
        return True

    def has_read(self, size: int) -> None:
        self._unread = max(0, self._unread - size)

    def defer_finals(self, request_ids: set[str]) -> None:
        self._pending_finals |= request_ids

    def flush_finals(self) -> None:
        """Try to tell the ends that are owed."""
        if self._pending_finals and self.send(
            Outputs([lost_output(request_id) for request_id in self._pending_finals])
        ):
            self._pending_finals.clear()

    def close(self) -> None:
        self._outlet.close()


def lost_output(request_id: str) -> Refused:
    return Refused(
        request_id=request_id,
        reason=RefusalReason.INTERNAL,
        detail="The output could not be delivered in time.",
    )


def tell_joined(runtime: Runtime) -> None:
    """Say that a rank's start is over, to the agent of a machine other than the first."""
    if runtime.settings.node_rank == 0:
        return
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outlet = Outlet(context, runtime.machine_socket)
    outlet.send(PhaseReport(EngineState.READY, "joined"))
    outlet.close()
    context.term()


class Links:
    """The sockets of a member's engine."""

    def __init__(self, runtime: Runtime, member: int = 0) -> None:
        self._context = zmq.Context()
        self.inbox = self._context.socket(zmq.PULL)
        self.inbox.set_hwm(_RECEIVE_QUEUE)
        self.inbox.bind(runtime.engine_socket(member))
        self.agent = Outlet(self._context, runtime.agent_socket(member))
        self.frontends = [
            FrontendOutlet(Outlet(self._context, runtime.frontend_socket(index, member)))
            for index in range(runtime.settings.frontends)
        ]

    def report(self, phase: PhaseReport) -> None:
        """Progress of the start, for the agent to show."""
        self.agent.send(phase)

    def close(self) -> None:
        """What was sent last still leaves, within a second."""
        for frontend in self.frontends:
            frontend.close()
        self.agent.close()
        self.inbox.close(0)
        self._context.term()
