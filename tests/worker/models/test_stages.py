"""How a model's layers are dealt out to the stages of a pipeline."""

from __future__ import annotations

from itertools import product

import pytest

from radixgrove.protocol.model.config import ModelConfig, ModelError
from radixgrove.protocol.model.parse import parse_config
from radixgrove.worker.models.stages import Stage, split_layers


def config(layers: int, vocab: int = 1000, *, tied: bool = False) -> ModelConfig:
    return parse_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "vocab_size": vocab,
            "tie_word_embeddings": tied,
        }
    )


def heaviest(counts: list[int], vocab: int) -> int:
    """What the stage that computes most multiplies with: a quarter of the head, no embedding."""
    layer, head = 4 * 64 * 64 + 3 * 64 * 128, vocab * 64
    weights = [count * layer for count in counts]
    weights[-1] += head // 4
    return max(weights)


@pytest.mark.parametrize("vocab", [10, 1000, 4000])
@pytest.mark.parametrize(("layers", "stages"), [(7, 2), (8, 3), (9, 4)])
def test_in_no_other_split_the_heaviest_stage_is_lighter(
    layers: int, stages: int, vocab: int
) -> None:
    counts = split_layers(config(layers, vocab), stages, [], on_cpu=True)
    assert sum(counts) == layers
    others = product(range(1, layers + 1), repeat=stages)
    best = min(heaviest(list(other), vocab) for other in others if sum(other) == layers)
    assert heaviest(counts, vocab) == best


def test_a_quarter_of_a_head_like_eight_layers_is_worth_two() -> None:
    assert split_layers(config(30, vocab=5120), 2, [], on_cpu=True) == [16, 14]


def test_on_a_gpu_layers_alone_count() -> None:
    assert split_layers(config(30, vocab=5120), 2, []) == [15, 15]
    assert split_layers(config(31), 2, []) == [15, 16]


def test_one_stage_is_the_whole_model() -> None:
    assert split_layers(config(3), 1, []) == [3]
    assert Stage.of(0, [3]) == Stage.whole(config(3))


def test_stages_follow_each_other_from_the_embedding_to_the_head() -> None:
    stages = [Stage.of(index, [1, 3, 2]) for index in range(3)]
    assert [stage.layers for stage in stages] == [range(1), range(1, 4), range(4, 6)]
    assert [stage.embeds for stage in stages] == [True, False, False]
    assert [stage.has_head for stage in stages] == [False, False, True]


@pytest.mark.parametrize("wanted", [[3], [2, 2], [1, 1, 1]])
def test_layers_that_are_not_the_models_are_refused(wanted: list[int]) -> None:
    with pytest.raises(ModelError, match=r"are not the model's 3 layers in 2 stages"):
        split_layers(config(3), 2, wanted)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="pp 4 exceeds the model's 3 layers"):
        split_layers(config(3), 4, [])


def test_what_is_set_goes_first() -> None:
    assert split_layers(config(3), 2, [1, 2]) == [1, 2]
