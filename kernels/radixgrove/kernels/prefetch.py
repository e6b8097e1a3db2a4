# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Device code that brings memory into the L2 cache while the kernel before still runs.

With programmatic dependent launch a kernel's first programs are resident before its inputs are
there. What does not depend on the kernel before (weights, KV of earlier tokens) can be on its way
meanwhile. Anything written by the kernel before that one is complete: each waits before it lets
the next one start.
"""

from __future__ import annotations

from radixgrove.kernels._triton import jit, tl


@jit
def prefetch_l2(pointers):
    """Ask for the 128-byte line of each pointer; nothing waits for it. Not in the interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def prefetch_rows(rows, start, stop, COLUMNS: tl.constexpr):
    """Ask for columns `start` to `start + COLUMNS`, before `stop`, of rows that begin at `rows`
    [N]; a line that would lie past `stop` is the first one instead."""
    item: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
    per_line: tl.constexpr = 128 // item
    column = start + tl.arange(0, COLUMNS // per_line) * per_line
    column = tl.where(column < stop, column, start)
    prefetch_l2(rows[:, None] + column[None, :])
