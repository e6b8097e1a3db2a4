"""Float8 weights on a GPU, beside what they stand for; and which experts a mixture chooses.

    python -m benchmarks.correctness.gpu_quantized [--random NAME ...] [--format none rows blocks]

A random model is written with float8 weights, and again with what those stand for, in float32.
transformers in float32 on the latter is exact. The reference is transformers in bfloat16, whose
projections round their inputs to float8 as the format says, in plain torch: both round in other
places, and the engine may be twice as far from exact as that. Judged are

- log-probabilities of texts that the engine has written, scored by it;
- decoding beside scoring of the same text, by the engine and by the reference (KL), also one text
  at a time;
- of mixtures, the experts of every token where the margin between the last one chosen and the next
  is more than the reference's error could cross.

With `none` weights are bfloat16, and the reference is transformers' own bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.correctness.gpu_correctness import check_logprobs, check_rescoring, forbid_tf32
from benchmarks.correctness.judge import Judge, Reference, Report
from benchmarks.correctness.models import (
    RANDOM_TIE,
    add_model_options,
    make_prompts,
    make_random_model,
)
from benchmarks.correctness.subject import Subject
from radixgrove.kernels.float8 import FLOAT8
from radixgrove.kernels.quantize import quantize_rows, rounded, widened
from radixgrove.kernels.weight import Weight
from radixgrove.protocol.model.quantization import Activations
from radixgrove.protocol.settings import DType
from radixgrove.worker.models.ops import KernelOps, TorchOps

DEFAULT = ["qwen3-8-2", "qwen3-moe-8-2"]
BLOCK = (128, 128)
CONFIGS: dict[str, dict[str, Any]] = {
    "rows": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
        "ignore": ["lm_head"],
    },
    "blocks": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": ["lm_head"],
    },
}
# The engine may be so many times as far from exact as the reference.
ALLOWED = 2.0
# Of tokens with a clear margin, so many may choose otherwise: where an earlier layer's choice was
# close, later ones see another token.
ROUTES_BOUND = 0.01
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_PROJECTIONS = (*_ATTENTION, "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_ROUTED_TEXTS = 8
ALONE = 16  # texts that are decoded one by one
_QUANTILE = 0.99  # of the reference's errors of router logits, which is taken for its error


@dataclass(frozen=True, slots=True)
class Written:
    """Directories of a model in float8 and of what that stands for, and the format's weights."""

    quantized: Path
    exact: Path
    kind: str


def write(model_dir: Path, kind: str, directory: Path) -> Written:
    """Quantize every projection, of experts too; routers and the head stay."""
    made = Written(directory / f"{model_dir.name}-{kind}", directory / f"{kind}-exact", kind)
    config = json.loads((model_dir / "config.json").read_text())
    payload: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for name, tensor in _tensors(model_dir):
        if _is_projection(name):
            weight = quantize(tensor, kind)
            assert weight.scales is not None
            scales = weight.scales if kind == "blocks" else weight.scales[:, None]
            payload[name] = weight.payload
            payload[name + ("_scale_inv" if kind == "blocks" else "_scale")] = scales
            exact[name] = widened(weight)
        else:
            payload[name], exact[name] = tensor, tensor.float()
    for target, tensors, more in (
        (made.quantized, payload, {"quantization_config": CONFIGS[kind]}),
        (made.exact, exact, {"dtype": "float32"}),
    ):
        target.mkdir()
        (target / "config.json").write_text(json.dumps(config | more))
        save_file(
            {name: t.contiguous() for name, t in tensors.items()}, target / "model.safetensors"
        )
    return made


def _tensors(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(model_dir.glob("*.safetensors")):
        yield from load_file(file).items()


def _is_projection(name: str) -> bool:
    return any(name.endswith(f".{part}.weight") for part in _PROJECTIONS)


def quantize(matrix: Tensor, kind: str) -> Weight:
    """[N, K] as the format stores it."""
    n, k = matrix.shape
    payload = torch.empty((n, k), dtype=FLOAT8, device=matrix.device)
    if kind == "rows":
        scales = torch.empty(n, device=matrix.device)
        quantize_rows(matrix, payload, scales)
        return Weight(payload, torch.bfloat16, scales, activations=Activations.TOKEN)
    rows, columns = BLOCK
    scales = torch.empty((-(-n // rows), -(-k // columns)), device=matrix.device)
    for down, row in enumerate(range(0, n, rows)):
        for right, column in enumerate(range(0, k, columns)):
            part = matrix[row : row + rows, column : column + columns]
            flat, scale = torch.empty((1, part.numel()), dtype=FLOAT8), torch.empty(1)
            quantize_rows(part.reshape(1, -1).cpu(), flat, scale)
            scales[down, right] = scale[0]
            payload[row : row + rows, column : column + columns] = flat.view(part.shape)
    return Weight(payload, torch.bfloat16, scales, BLOCK, Activations.GROUP)


class QuantizingReference(Reference):
    """transformers in bfloat16 on what the weights stand for, with projections in float32 of inputs
    that are rounded to float8 as the format says."""

    def __init__(self, written: Written) -> None:
        super().__init__(written.exact, torch.float32)
        projections = {
            name: module
            for name, module in self._model.named_modules()
            if _multiplies(name, module)
        }
        kept = {
            name: {key: value.data.clone() for key, value in module.named_parameters()}
            for name, module in projections.items()
        }
        self._model.bfloat16()
        activations = Activations.GROUP if written.kind == "blocks" else Activations.TOKEN
        like = Weight(torch.empty(0), torch.bfloat16, block=BLOCK, activations=activations)
        parts = Weight(torch.empty(0), torch.bfloat16, block=BLOCK, activations=Activations.GROUP)
        for name, module in projections.items():
            if isinstance(module, torch.nn.Linear):
                matrix = kept[name]["weight"]
                module.forward = partial(_product, matrix=matrix, like=like)
            else:
                module.forward = partial(
                    _experts, kept[name]["gate_up_proj"], kept[name]["down_proj"], like, parts
                )


def _multiplies(name: str, module: torch.nn.Module) -> bool:
    """Whether it is a projection, or a stack of experts."""
    if isinstance(module, torch.nn.Linear):
        return _is_projection(f".{name}.weight")
    stack = getattr(module, "gate_up_proj", None)
    return isinstance(stack, Tensor) and stack.ndim == 3


def _product(x: Tensor, matrix: Tensor, like: Weight) -> Tensor:
    flat = rounded(x.reshape(-1, x.shape[-1]), like)
    return torch.nn.functional.linear(flat, matrix).to(x.dtype).view(*x.shape[:-1], -1)


def _experts(
    gate_up: Tensor,
    down: Tensor,
    like: Weight,
    parts: Weight,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
) -> Tensor:
    """As transformers' experts, [T, K] for [T, top_k] of them; what comes between the products has
    scales of parts of rows in every format, as the engine's has."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = _product(x[token], gate_up[expert], like).float().chunk(2, -1)
        h = (torch.nn.functional.silu(gate) * up).to(x.dtype)
        y = _product(h, down[expert], parts).float()
        out.index_add_(0, token, y * weights[token, slot, None].float())
    return out.to(x.dtype)


def check(model: str, model_dir: Path, kind: str, backend: str, report: Report) -> None:
    what = f"{model} {kind} {backend}"
    with tempfile.TemporaryDirectory() as scratch, report.guarded(what):
        if kind == "none":
            served, judge = model_dir, Judge.of(model_dir, RANDOM_TIE)
        else:
            written = write(model_dir, kind, Path(scratch))
            served = written.quantized
            exact = Reference(written.exact, torch.float32)
            judge = Judge(exact, QuantizingReference(written), RANDOM_TIE)
        subject = Subject(served, DType.BFLOAT16, backend)
        try:
            prompts = make_prompts(served, subject.engine.info.vocab_size)
            check_logprobs(what, subject, prompts, judge, report)
            subject.flush()
            check_rescoring(what, subject, prompts, judge, report, allowed=ALLOWED, alone=ALONE)
        finally:
            subject.close()
        if "num_experts_per_tok" in json.loads((model_dir / "config.json").read_text()):
            check_routes(what, served, backend, prompts, judge, report)


def check_routes(
    what: str,
    model_dir: Path,
    backend: str,
    prompts: list[list[int]],
    judge: Judge,
    report: Report,
) -> None:
    """Experts of every token, layer by layer, where the reference's error cannot decide."""
    config = json.loads((model_dir / "config.json").read_text())
    top_k = config["num_experts_per_tok"]
    texts = sorted(prompts, key=len)[-_ROUTED_TEXTS:]
    ours = [list[Tensor]() for _ in texts]
    subject = Subject(model_dir, DType.BFLOAT16, backend, cuda_graphs=False)
    try:
        for text, layers in zip(texts, ours, strict=True):
            with recorded_router_logits() as found:
                subject.generate([text], max_tokens=1, temperature=0.0, prompt_logprobs=0)
            layers += [logits for logits in found if len(logits) == len(text)]
            subject.flush()
    finally:
        subject.close()
    exact = [judge.exact.router_logits(text) for text in texts]
    theirs = [judge.rounded.router_logits(text) for text in texts]
    wrong = wrong_of_reference = clear = total = 0
    for layer in range(min(map(len, ours))):
        true, own, rounding = (
            torch.cat([text[layer].float().cpu() for text in logits])
            for logits in (exact, ours, theirs)
        )
        error = (rounding - true).abs().amax(-1).quantile(_QUANTILE)
        best = true.sort(-1, descending=True).values
        is_clear = best[:, top_k - 1] - best[:, top_k] > 2 * error
        clear, total = clear + int(is_clear.sum()), total + len(true)
        wrong += int((_differ(own, true, top_k) & is_clear).sum())
        wrong_of_reference += int((_differ(rounding, true, top_k) & is_clear).sum())
    share = wrong / max(1, clear)
    report.check(
        f"{what}: experts are chosen alike",
        clear > 0 and share <= max(ROUTES_BOUND, ALLOWED * wrong_of_reference / max(1, clear)),
        f"{wrong} of {clear:,} clear choices differ, {wrong_of_reference} of the reference's; "
        f"{clear / max(1, total):.0%} of {total:,} are clear",
        differ=wrong,
        differ_of_reference=wrong_of_reference,
        clear=clear,
        total=total,
    )


def _differ(logits: Tensor, true: Tensor, top_k: int) -> Tensor:
    """[T] whether the experts with the largest logits are others."""
    chosen, expected = (x.topk(top_k, -1).indices.sort(-1).values for x in (logits, true))
    return (chosen != expected).any(-1)


@contextmanager
def recorded_router_logits() -> Iterator[list[Tensor]]:
    """Of the engine's steps meanwhile, layer by layer, [T, experts] float32; not from graphs."""
    found: list[Tensor] = []

    def recording(experts: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def record(self: object, x: Tensor, logits: Tensor, *rest: Any) -> Tensor:
            found.append(logits.cpu())
            return experts(self, x, logits, *rest)

        return record

    kinds: list[Any] = [KernelOps, TorchOps]
    before = [kind.experts for kind in kinds]
    for kind, experts in zip(kinds, before, strict=True):
        kind.experts = recording(experts)
    try:
        yield found
    finally:
        for kind, experts in zip(kinds, before, strict=True):
            kind.experts = experts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument(
        "--format", nargs="+", default=["rows", "blocks"], choices=["none", *CONFIGS]
    )
    parser.add_argument("--backend", nargs="+", default=["triton"])
    arguments = parser.parse_args(argv)
    if arguments.model is not None:
        parser.error("--model is not for this check: it writes models of its own")
    forbid_tf32()
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.random or DEFAULT:
            model_dir = make_random_model(name, Path(scratch))
            for kind in arguments.format:
                for backend in arguments.backend:
                    check(name, model_dir, kind, backend, report)
    print("all passed" if not report.failed else f"{report.failed} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
