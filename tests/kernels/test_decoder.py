"""A whole decoder by the kernels that the tuner may choose, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from radixgrove.kernels import ops
from radixgrove.kernels.matmul import CUBLAS, Choice, multiply
from radixgrove.kernels.skinny import SkinnyConfig, SkinnyWorkspace
from radixgrove.kernels.weight import Weight
from radixgrove.protocol.model.config import (
    Attention,
    Mlp,
    ModelConfig,
    Multipliers,
    Norms,
    QkNorm,
    RopeConfig,
)
from radixgrove.worker.attention.base import AttentionBatch
from radixgrove.worker.attention.torch import TorchAttention
from radixgrove.worker.models.context import TensorPlacement
from radixgrove.worker.models.decoder import Decoder
from radixgrove.worker.models.ops import KernelOps, Ops, TorchOps
from radixgrove.worker.models.weights import fill_random
from radixgrove.worker.parallel.group import Shard, TensorParallel
from tests.kernels.helpers import assert_close

CONFIG = ModelConfig(
    hidden_size=64,
    num_layers=2,
    vocab_size=150,
    max_position_embeddings=64,
    tied_embeddings=True,
    norms=Norms(eps=1e-6),
    attention=Attention(
        heads=4,
        kv_heads=2,
        head_dim=16,
        scale=0.25,
        rope=RopeConfig(theta=10000.0, parameters={}),
        qkv_bias=True,
        qk_norm=QkNorm.HEAD,
    ),
    mlp=Mlp(width=80),
    experts=None,
    multipliers=Multipliers(),
    dtype="float32",
    quantization=None,
)
TOKENS = 5
WIDE = SkinnyConfig(block_n=32, block_k=32, stages=2)
SPLIT = SkinnyConfig(block_n=16, block_k=16, splits=3, stages=2)


def make_decoder(ops: Ops, device: torch.device) -> Decoder:
    """The same weights every time; norms differ from 1, and biases from 0."""
    decoder = Decoder(CONFIG, TensorPlacement(TensorParallel(Shard()), torch.float32, device), ops)
    fill_random(decoder.parts(), seed=3)
    generator = torch.Generator(device).manual_seed(4)
    for part in decoder.parts():
        if part.target.ndim == 1:
            part.target.normal_(1.0, 0.3, generator=generator)
        else:
            part.target.mul_(8.0)
    decoder.prepare()
    return decoder


def logits_of(decoder: Decoder, device: torch.device) -> Tensor:
    """Of every token of one prompt."""
    attention = TorchAttention(
        torch.zeros(CONFIG.num_layers, 2, 2, 16, 2, 16, device=device),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        scale=0.25,
    )
    places = torch.arange(TOKENS, device=device)
    batch = AttentionBatch(
        num_prefills=1,
        num_decodes=0,
        num_prefill_tokens=TOKENS,
        rows=torch.zeros(1, dtype=torch.int32, device=device),
        qo_indptr=torch.tensor([0, TOKENS], dtype=torch.int32, device=device),
        kv_lens=torch.tensor([TOKENS], dtype=torch.int32, device=device),
        page_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
        slots=places,
        positions=places,
        q_lens_host=[TOKENS],
        kv_lens_host=[TOKENS],
    )
    attention.plan(batch)
    token_ids = torch.tensor([3, 149, 0, 77, 3], device=device)
    hidden = decoder.hidden_states(token_ids, batch, attention)
    return decoder.logits(hidden)


@pytest.mark.parametrize(
    "choice",
    [CUBLAS, Choice(skinny=WIDE), Choice(skinny=SPLIT)],
    ids=["library", "skinny", "skinny, split"],
)
def test_every_choice_gives_the_same_logits(
    choice: Choice, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    expected = logits_of(make_decoder(TorchOps(), device), device)
    multiplied = []

    class Scratch:
        skinny = SkinnyWorkspace(device, partials=1 << 18)
        cublaslt = None

    def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, **options: Any) -> Tensor:
        multiplied.append(options.get("norm") is not None)
        return multiply(x, weight, bias, choice=choice, scratch=Scratch(), **options)  # type: ignore[arg-type]

    def feed(x: Tensor, weight: Weight, feeds: Weight, bias: None, **options: Any) -> Tensor:
        assert options.pop("added_to") is None, "no product leaves its residual to a norm"
        return linear(x, weight, silu=True, **options)

    monkeypatch.setattr(ops, "linear", linear)
    monkeypatch.setattr(ops, "feed", feed)
    logits = logits_of(make_decoder(KernelOps(), device), device)
    assert_close(logits, expected, 2e-5)
    assert multiplied == [True, False, True, False] * CONFIG.num_layers + [True]
    assert not Scratch.skinny.counters.any()
