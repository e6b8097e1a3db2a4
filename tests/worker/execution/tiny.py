"""Small random-weight models saved by transformers, one of each supported kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.worker.execution import reference

VOCAB = 512
_LONGEST = 160  # tokens of a prompt
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # strong enough that the next token is a clear choice
}
# Three ranks can share these, as they can the demo model's.
NINE_HEADS = {
    "hidden_size": 144,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": VOCAB + 1,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama3-rope": ("Llama", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": (
        "Qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "decoder_sparse_step": 2,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40}),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.5,  # which some values pass
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.1,
            "logits_scaling": 1.5,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "glm": ("Glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 32, "pad_token_id": 0}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "mistral-window": ("Mistral", {"sliding_window": 20}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1},
    ),
    "starcoder2": ("Starcoder2", {"pad_token_id": 0}),
}
# With parts that others lack.
PARTS = ("granite", "olmo2", "phi3", "smollm3", "starcoder2", "glm4", "stablelm")
WINDOWED = ("gemma3", "mistral-window", "qwen2-window")
_CONFIGS = {"Gemma3": "Gemma3Text"}  # what transformers calls them where it is not as the models
MIXTURES = ("mixtral", "qwen3-moe", "qwen2-moe", "olmoe", "gpt-oss")


def save(kind: str, directory: Path, **sizes: int) -> Any:
    """Write the model of `kind` into `directory`; the transformers model itself."""
    import transformers

    name, changes = KINDS[kind]
    config = getattr(transformers, f"{_CONFIGS.get(name, name)}Config")(
        **{**_SIZES, **changes, **sizes}
    )
    torch.manual_seed(len(kind))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    # Norms and biases start at one and zero, where a mistake in their use would not show.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(VOCAB, (length,), generator=generator).tolist()
        for length in (1, 2, 15, 16, 17, 33, 90, 130)
    ]


@dataclass(frozen=True)
class SmallModel:
    """A Llama whose random weights make every token depend on all before it."""

    directory: Path
    prompts: list[list[int]]
    answers: list[list[int]]  # its greedy ones, by transformers


def small_model(directory: Path, texts: Sequence[Sequence[int]], max_tokens: int) -> SmallModel:
    """Written into `directory`; its prompts have the lengths and repetitions of `texts`."""
    model = save("llama", directory)
    prompts = [[token % VOCAB for token in text[:_LONGEST]] for text in texts]
    answers = reference.greedy(model, prompts, max_tokens)
    assert all(len(set(answer)) > max_tokens // 4 for answer in answers), "circles prove little"
    return SmallModel(directory, prompts, answers)
