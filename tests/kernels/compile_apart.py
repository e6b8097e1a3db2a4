"""Launch kernels for compute capability 9.0 from threads while processes compile, without a GPU.

A process of its own: Triton must not be in interpreter mode here. Prints one line a launch: the
kernel's name, and whether Triton's cache on disk had it.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from radixgrove.kernels import activation, compilers, norm, routing


def launch_all() -> None:
    half = torch.zeros(2, 256, dtype=torch.bfloat16)
    load = torch.zeros(16, dtype=torch.int64)
    router = routing.Router(routing.Routing(2, renormalize=True, scale=1.5), load=load)
    jobs = [
        lambda: norm.rms_norm(half, half[0], 1e-6),
        lambda: norm.rms_norm(half, half[0], 1e-6),  # twice at once
        lambda: routing.route(torch.zeros(2, 16), router),
    ]
    apart = compilers.compiling_apart(torch.device("cuda"), 8, at_once=False)
    with apart, ThreadPoolExecutor(len(jobs)) as executor:
        activation.silu_and_mul(half)
        for done in [executor.submit(job) for job in jobs]:
            done.result()
    assert knobs.runtime.jit_cache_hook is None
    assert knobs.cache.manager_class is None


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    driver.set_active(compilers.CompileOnly(90))
    torch.cuda.get_device_capability = lambda device: (9, 0)
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    def say(*, src: Any, cache_hit: bool, **_: Any) -> None:
        os.write(1, f"{src.fn.__name__} {cache_hit}\n".encode())  # whole lines, of any thread

    JITFunction.run = compile_only
    for module in (activation, norm, routing):
        setattr(module, "pdl", lambda x: {"PDL": True, "launch_pdl": True})  # noqa: B010
    knobs.compilation.listener = say
    launch_all()
