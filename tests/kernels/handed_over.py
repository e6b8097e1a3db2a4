"""Launch every kernel in every form, with nothing compiled, and ask for each as a process would be.

A process of its own: Triton must not be in interpreter mode here. Prints one line a launch: the
kernel's name, and whether a process would leave in Triton's cache what the launch looks for there.
"""

from __future__ import annotations

import os
from typing import Any

import compile_sm90
import torch
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction, get_full_name, serialize_specialization_data

from radixgrove.kernels.compilers import CompileOnly, preload
from radixgrove.kernels.float8 import FLOAT8

Asked = tuple[str, str]
asked: list[Asked] = []


def ask(
    self: Any,
    key: str,
    signature: Any,
    device: int,
    constants: Any,
    options: Any,
    attributes: Any,
    warmup: bool,
) -> None:
    """In place of compiling: the parts of the cache's key that are a launch's own."""
    asked.append((ASTSource(self, signature, constants, attributes).hash(), options.hash()))
    if len(asked) == 1:
        name = get_full_name(self.fn)
        handed = serialize_specialization_data(name, signature, constants, attributes, options, key)
        preload(self.fn.__module__, self.fn.__qualname__, handed)


def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    asked.clear()
    RUN(self, *args, grid=grid, warmup=True, **options)
    here, there = asked
    print(self.fn.__name__, here == there)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    driver.set_active(CompileOnly(90))
    RUN = JITFunction.run
    JITFunction.run, JITFunction._do_compile = launch, ask
    for module in compile_sm90.MODULES:
        if hasattr(module, "pdl"):
            setattr(module, "pdl", compile_sm90.always_pdl)  # noqa: B010
    for dtype in (torch.bfloat16, torch.float32):
        compile_sm90.launch_all(dtype)
        compile_sm90.launch_gpt_oss(dtype)
        compile_sm90.launch_paged(dtype, FLOAT8)
    compile_sm90.launch_float8(4096)
    compile_sm90.launch_int8(4096)
    compile_sm90.launch_sampling()
    compile_sm90.launch_smallest()
