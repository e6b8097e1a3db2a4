"""Profiles of Hypothesis: how many examples tests of properties draw, and in what time."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Time is no property: machines of tests are slow, and busy with other tests.
settings.register_profile(
    "whole", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
# `.ci/run`: what it finds is a change's own, and no property of older code that was never drawn.
settings.register_profile("same", settings.get_profile("whole"), derandomize=True)
# `make test` has another third of the examples each time, and `make test-slow` all.
settings.register_profile("third", settings.get_profile("whole"), max_examples=33)
# `--hypothesis-profile thorough`: for a night, or a doubt.
settings.register_profile("thorough", settings.get_profile("whole"), max_examples=1000)
settings.load_profile("third")
