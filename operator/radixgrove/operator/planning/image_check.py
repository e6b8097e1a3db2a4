"""Whether a new image may take the place of one that runs. Pure.

A group that is ready is given up for an image only after that image has run on the group's nodes,
in a Job without GPUs. Where new groups come before old ones go (`maxUnavailable: 0`), nothing is
given up, and nothing is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixgrove.operator.planning.diagnosis import Problem, pod_problem, refusal
from radixgrove.operator.planning.observed import Group, JobState


@dataclass(frozen=True)
class Candidate:
    """An image to try, and the nodes of the ready groups that would go for it."""

    image: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class ImageCheck:
    """`hold`: no ready group is given up yet. `problem`: why not, if it is for good. `unseen`:
    there is no pod, and only Events, which are not watched, would say why."""

    hold: bool = False
    problem: Problem | None = None
    message: str = ""
    unseen: bool = False


def candidate(
    groups: Sequence[Group],
    target: str,
    max_unavailable: int,
    image_of: Callable[[str], str],
) -> Candidate | None:
    """What to try before groups of `target` take the place of others; None: nothing.

    `image_of` a revision is "" where its command is not the worker's own, so that nothing is known
    of what would run.
    """
    live = [group for group in groups if not group.draining]
    old = [group for group in live if group.revision != target and group.ready]
    new = [group for group in live if group.revision == target]
    if max_unavailable == 0 or not old or any(pod.running for g in new for pod in g.pods):
        return None
    image = image_of(target)
    if not image or all(image_of(group.revision) == image for group in old):
        return None
    nodes = {pod.node for group in old for pod in group.pods if pod.node}
    return Candidate(image, tuple(sorted(nodes)))


def judge(wanted: Candidate, job: JobState | None) -> ImageCheck:
    """What the Job that tries it tells so far."""
    if job is not None and job.succeeded:
        return ImageCheck()
    where = ", ".join(wanted.nodes)
    message = f"{wanted.image} is tried on {where} before the running groups go"
    if job is None:
        return ImageCheck(hold=True, message=message, unseen=True)
    if job.failed:
        said = job.message.strip() or "it ended without a message"
        words = f"`radixgrove --version` of {wanted.image} failed on {where}: {said[-500:]}"
        return ImageCheck(hold=True, problem=Problem("ImageCheckFailed", words))
    if job.pod is not None:
        trouble = pod_problem(job.pod)
    else:
        trouble = refusal(job.refused) if job.refused else None
    if trouble is None:
        return ImageCheck(hold=True, message=message, unseen=job.pod is None)
    if not trouble.stuck:  # no room, or quota, even for so small a pod: it cannot be tried
        return ImageCheck()
    return ImageCheck(hold=True, problem=trouble)
