"""What starting workers say they are doing, over their management port."""

from __future__ import annotations

import json
from collections.abc import Sequence

import urllib3

from radixgrove.operator import names
from radixgrove.operator.observe import Group


class WorkerProbe:
    """Short requests; a worker that does not answer says nothing."""

    def __init__(self, management_key: str) -> None:
        self._pool = urllib3.PoolManager(
            num_pools=32, timeout=urllib3.Timeout(connect=1.0, read=2.0), retries=False
        )
        self._headers = {"Authorization": f"Bearer {management_key}"}

    def phases(self, groups: Sequence[Group], at_most: int = 8) -> list[str]:
        """One line for each starting group's rank 0, of the first few."""
        lines = []
        starting = [g for g in groups if g.pods and not g.ready and not g.draining]
        for group in starting[:at_most]:
            pod = group.pods[0]
            phase = self._phase(pod.address) if pod.running and pod.address else ""
            if phase:
                lines.append(f"group {group.index}: {phase}")
        return lines

    def _phase(self, address: str) -> str:
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{names.MANAGEMENT_PORT}/status"
        try:
            response = self._pool.request("GET", url, headers=self._headers)
            said = json.loads(response.data) if response.status == 200 else {}
        except (urllib3.exceptions.HTTPError, ValueError):
            return ""
        phase = said.get("phase") if isinstance(said, dict) else None
        return str(phase.get("message", ""))[:128] if isinstance(phase, dict) else ""
