"""Compile FlashInfer's kernels for head dimensions, as a worker does at its first start.

python -m benchmarks.engine.compile_attention 128 64
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from radixgrove.worker.attention.flashinfer import FlashInferAttention


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("head_dim", nargs="+", type=int)
    arguments = parser.parse_args(argv)
    for head_dim in arguments.head_dim:
        begin = time.monotonic()
        pool = torch.zeros(1, 2, 2, 16, 2, head_dim, dtype=torch.bfloat16, device="cuda")
        backend = FlashInferAttention(
            pool, num_heads=4, num_kv_heads=2, head_dim=head_dim, scale=head_dim**-0.5
        )
        backend.warm_up(lambda message, _: print(message, flush=True))
        print(f"head dimension {head_dim}: {time.monotonic() - begin:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
