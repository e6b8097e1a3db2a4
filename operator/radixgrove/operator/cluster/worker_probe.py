"""Asks workers: how far a start is, and whether a machine is there at all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import aiohttp

from radixgrove.operator.api import names
from radixgrove.operator.planning.observed import Group, Pod
from radixgrove.protocol.foreign import decode_json

_CONNECT_SECONDS = 1.0
_ANSWER_SECONDS = 2.0
_AT_ONCE = 16
_LONGEST = 1 << 16  # bytes of an answer


class WorkerProbe:
    """Short requests; a worker that does not answer is left out.

    What runs in a pod is its namespace's: an answer that never ends holds up nothing.
    """

    def phases(
        self, groups: Sequence[Group], management_keys: Sequence[str], at_most: int = 8
    ) -> list[str]:
        """One line for each starting group's rank 0, of the first few.

        `management_keys`: those that a worker may have, tried in turn.
        """
        starting = [
            (group.index, group.pods[0].address)
            for group in groups
            if group.pods and not group.ready and not group.draining
            if group.pods[0].running and group.pods[0].address
        ][:at_most]
        if not starting:
            return []
        addresses = [address for _, address in starting]
        phases = asyncio.run(_phases(addresses, management_keys))
        return [
            f"group {index}: {phase}"
            for (index, _), phase in zip(starting, phases, strict=True)
            if phase
        ]

    def silent_nodes(self, pods: Sequence[Pod]) -> set[str]:
        """Nodes of pods that run as far as the API server knows, and do not answer.

        None, when no pod answers at all: then it is this process that reaches nothing.
        """
        asked = [p for p in pods if p.address and p.phase == "Running" and p.deleted_at is None]
        if not asked:
            return set()
        with ThreadPoolExecutor(min(len(asked), _AT_ONCE)) as pool:
            answers = list(pool.map(_answers, [pod.address for pod in asked]))
        if not any(answers):
            return set()
        return {pod.node for pod, answer in zip(asked, answers, strict=True) if not answer}


async def _phases(addresses: Sequence[str], management_keys: Sequence[str]) -> list[str]:
    timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS, connect=_CONNECT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        asked = [_phase(session, address, management_keys) for address in addresses]
        return await asyncio.gather(*asked)


async def _phase(
    session: aiohttp.ClientSession, address: str, management_keys: Sequence[str]
) -> str:
    try:
        for key in management_keys:
            said = await _status(session, address, key)
            if said is not None:
                phase = said.get("phase")
                return _words(phase) if isinstance(phase, dict) else ""
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        pass
    return ""


async def _status(
    session: aiohttp.ClientSession, address: str, management_key: str
) -> dict[str, object] | None:
    """None where the key is another one. Raises ClientError, OSError, TimeoutError, ValueError."""
    headers = {"Authorization": f"Bearer {management_key}"}
    url = names.pod_url(address, names.MANAGEMENT_PORT) + "/status"
    async with session.get(url, headers=headers, allow_redirects=False) as response:
        if response.status in (401, 403):
            return None
        if response.status != 200:
            return {}
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > _LONGEST:
                return {}
        return decode_json(bytes(body), dict[str, object])


def _words(phase: dict[str, object]) -> str:
    """`loading, 40%: weights: 3 of 7 files`."""
    state, fraction = str(phase.get("state", ""))[:32], phase.get("fraction")
    share = f", {min(max(fraction, 0.0), 1.0):.0%}" if isinstance(fraction, float) else ""
    return f"{state}{share}: {str(phase.get('message', ''))[:128]}"


def _answers(address: str) -> bool:
    """Whether a pod's machine is there: also one that refuses the connection is."""
    try:
        with socket.create_connection((address, names.API_PORT), _CONNECT_SECONDS) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
            connection.recv(1)
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    except OSError:
        return False
    return True
