"""Models and prompts of the checks: a given one, and small ones with random weights."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import results

PROMPTS = 50
# Gaps of float32 log-probability that are ties; random weights make flat distributions.
REAL_TIE, RANDOM_TIE = 2e-5, 1e-4
MODELS: dict[str, dict[str, Any]] = {
    "llama-9-3": {"kind": "LlamaConfig", "num_attention_heads": 9, "num_key_value_heads": 3},
    "llama-8-2": {"kind": "LlamaConfig", "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen2-7-1": {"kind": "Qwen2Config", "num_attention_heads": 7, "num_key_value_heads": 1},
    "qwen3-8-2": {"kind": "Qwen3Config", "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3-moe-8-2": {
        "kind": "Qwen3MoeConfig",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "mixtral-8-2": {"kind": "MixtralConfig", "num_attention_heads": 8, "num_key_value_heads": 2},
    "gemma3-8-2": {  # five layers with a window, and one without
        "kind": "Gemma3TextConfig",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 128,
        "sliding_window": 64,
    },
    "gpt-oss-16-2": {  # every second layer with a window
        "kind": "GptOssConfig",
        "hidden_size": 960,  # as its own, no multiple of a kernel's blocks
        "head_dim": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "intermediate_size": 960,
        "initializer_range": 0.02,
        "sliding_window": 64,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
    "glm4-8-2": {
        "kind": "Glm4Config",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
    "stablelm-8-8": {
        "kind": "StableLmConfig",
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "use_qkv_bias": True,
    },
    "qwen3-30b-a3b-4": {  # four layers of its widths
        "kind": "Qwen3MoeConfig",
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "initializer_range": 0.02,
    },
}

Named = tuple[str, Path, float]  # a model's name and directory, and what is a tie there


def make_prompts(model_dir: Path, vocab_size: int) -> list[list[int]]:
    """Paragraphs of this project's documentation, or random ids for a model without tokenizer."""
    rng = random.Random(1)
    tokenizer_file = model_dir / "tokenizer.json"
    if not tokenizer_file.exists():
        return [
            [rng.randrange(vocab_size) for _ in range(rng.randint(3, 200))] for _ in range(PROMPTS)
        ]
    from tokenizers import Tokenizer

    text = "\n".join(path.read_text() for path in sorted(results.ROOT.glob("**/*.md"))[:40])
    ids = Tokenizer.from_file(str(tokenizer_file)).encode(text[:400_000]).ids
    starts = [rng.randrange(len(ids) - 200) for _ in range(PROMPTS)]
    return [ids[start : start + rng.randint(3, 200)] for start in starts]


def make_random_model(name: str, directory: Path) -> Path:
    import transformers

    usual = {
        "hidden_size": MODELS[name]["num_attention_heads"] * 128,
        "head_dim": 128,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
        "initializer_range": 0.05,
        "tie_word_embeddings": name.startswith("qwen3"),
    }
    options = usual | MODELS[name]
    config = getattr(transformers, options.pop("kind"))(**options)
    torch.manual_seed(0)
    kind: Any = transformers.AutoModelForCausalLM
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = kind.from_config(config, dtype=torch.float32)
    # Weights that bfloat16 holds: what is compared is arithmetic alone.
    model.bfloat16().save_pretrained(directory / name)
    return directory / name


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--random", nargs="*", choices=MODELS, help="random models to make")


def chosen_models(
    arguments: argparse.Namespace, default: Callable[[bool], list[str]], scratch: Path
) -> list[Named]:
    """The model of `--model`, then random ones made in `scratch`.

    Args:
        default: names of random ones where none are asked for, if a model is given, and if not.
    """
    given = arguments.model
    models = [] if given is None else [(given.name, given, REAL_TIE)]
    names = default(given is not None) if arguments.random is None else arguments.random
    return models + [(name, make_random_model(name, scratch), RANDOM_TIE) for name in names]
