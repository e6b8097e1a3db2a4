"""`quantization_config` of a checkpoint: what is read, which projections it means, and what is
refused, by field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers.quantizers.quantizers_utils import should_convert_module

from radixgrove.protocol.model.config import ModelConfig, ModelError
from radixgrove.protocol.model.fit import Intended, check_fit
from radixgrove.protocol.model.parse import parse_config
from radixgrove.protocol.model.projections import unused_ignores
from radixgrove.protocol.model.quantization import (
    Activations,
    Numbers,
    Quantization,
    QuantizationError,
    Scales,
    Scheme,
    parse_quantization,
)

FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT8 = FLOAT8 | {"type": "int"}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def group(**changes: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": FLOAT8, "input_activations": TOKEN} | changes


def compressed(*groups: dict[str, Any], **changes: Any) -> Quantization:
    named = {f"group_{index}": one for index, one in enumerate(groups or [group()])}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return parse_quantization(config | {"config_groups": named} | changes)


class TestFp8:
    @pytest.mark.parametrize(
        ("changes", "scheme"),
        [
            ({}, Scheme(scales=Scales.TENSOR, activations=Activations.TOKEN)),
            (
                {"weight_block_size": None, "activation_scheme": "static"},
                Scheme(scales=Scales.TENSOR, activations=Activations.STATIC),
            ),
            (
                {"weight_block_size": [128, 64], "activation_scheme": "dynamic"},
                Scheme(scales=Scales.BLOCK, activations=Activations.GROUP, block=(128, 64)),
            ),
        ],
    )
    def test_schemes(self, changes: dict[str, Any], scheme: Scheme) -> None:
        found = parse_quantization({"quant_method": "fp8", **changes})
        assert found.scheme_of("model.layers.0.mlp.up_proj") == scheme
        assert found.scheme_of("lm_head") is None, "transformers never quantizes it"

    @pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
    def test_layers_left_alone(self, key: str) -> None:
        names = ["model.layers.1", "o_proj", "mlp.gate"]
        found = parse_quantization({"quant_method": "fp8", key: names})
        left = {
            "model.layers.1.mlp.up_proj": True,
            "model.layers.11.mlp.up_proj": False,
            "model.layers.0.self_attn.o_proj": True,
            "model.layers.0.mlp.gate_proj": False,
            "model.layers.0.mlp.gate": True,
        }
        assert {name: found.scheme_of(name) is None for name in left} == left

    def test_every_kind_of_entry_leaves_alone_what_transformers_does(self) -> None:
        """Of which long lists of names, as mixtures have them, are looked up."""
        entries = ["lm_head", "model.layers.2.", "mlp.gate", r"model\.layers\.[45]\.mlp"]
        entries += ["model.layers.*.experts.3", "(model).layers.6", "up_proj|.*7.mlp.down"]
        entries += [f"model.layers.{layer}.mlp.gate_proj" for layer in range(8, 60)]
        found = parse_quantization({"quant_method": "fp8", "modules_to_not_convert": entries})
        assert found.skipped is not None
        assert len(found.skipped.patterns) == 4
        modules = ("self_attn.q_proj", "mlp.gate", "mlp.gate_proj", "mlp.experts.3.up_proj")
        modules += ("mlp.experts.33.down_proj", "mlp.down_proj", "mlp.up_proj")
        names = [f"model.layers.{layer}.{name}" for layer in range(12) for name in modules]
        left = {name: not should_convert_module(name, entries) for name in ["lm_head", *names]}
        assert 0 < sum(left.values()) < len(left)
        assert {name: found.scheme_of(name) is None for name in left} == left


def test_fbgemm_bounds_activations() -> None:
    scheme = parse_quantization({"quant_method": "fbgemm_fp8"}).scheme_of("a")
    assert scheme is not None
    assert (scheme.scales, scheme.activation_bound) == (Scales.CHANNEL, 1200.0)


def test_mxfp4_is_of_experts_alone() -> None:
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    for given in ({"modules_to_not_convert": kept}, {}):
        found = parse_quantization({"quant_method": "mxfp4", **given})
        assert found.scheme_of("model.layers.0.mlp.experts.3.down_proj") == Scheme(
            scales=Scales.BLOCK,
            activations=Activations.KEPT,
            numbers=Numbers.FLOAT4,
            block=(1, 32),
        )
        for name in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.router", "lm_head"):
            assert found.scheme_of(name) is None


class TestCompressedTensors:
    @pytest.mark.parametrize(
        ("weights", "inputs", "scheme"),
        [
            ({}, TOKEN, Scheme(scales=Scales.CHANNEL, activations=Activations.TOKEN)),
            ({}, None, Scheme(scales=Scales.CHANNEL, activations=Activations.KEPT)),
            (
                {"strategy": "tensor"},
                TOKEN | {"strategy": "tensor", "dynamic": False},
                Scheme(scales=Scales.TENSOR, activations=Activations.STATIC),
            ),
            (
                {"strategy": "tensor"},
                TOKEN | {"strategy": "tensor"},
                Scheme(scales=Scales.TENSOR, activations=Activations.TOKEN),
            ),
            (
                {"strategy": "block", "block_structure": "128x128"},
                TOKEN | {"strategy": "group", "group_size": 128},
                Scheme(scales=Scales.BLOCK, activations=Activations.GROUP, block=(128, 128)),
            ),
            (
                INT8,
                INT8 | {"strategy": "token", "dynamic": True},
                Scheme(scales=Scales.CHANNEL, activations=Activations.TOKEN, numbers=Numbers.INT8),
            ),
            (
                INT8 | {"strategy": "tensor"},
                INT8 | {"strategy": "tensor"},
                Scheme(scales=Scales.TENSOR, activations=Activations.STATIC, numbers=Numbers.INT8),
            ),
            (
                {"strategy": "group", "group_size": 64},
                None,
                Scheme(scales=Scales.BLOCK, activations=Activations.KEPT, block=(1, 64)),
            ),
        ],
    )
    def test_schemes(self, weights: dict[str, Any], inputs: Any, scheme: Scheme) -> None:
        found = compressed(group(weights=FLOAT8 | weights, input_activations=inputs))
        assert found.scheme_of("model.layers.0.mlp.up_proj") == scheme

    def test_names_and_patterns_choose_the_projections(self) -> None:
        found = compressed(ignore=["lm_head", r"re:model\.layers\.\d+\.mlp\.gate$"])
        for name, quantized in {
            "lm_head": False,
            "model.lm_head": True,
            "model.layers.12.mlp.gate": False,
            "model.layers.12.mlp.gate_proj": True,
            "other.model.layers.12.mlp.gate": True,
        }.items():
            assert (found.scheme_of(name) is not None) == quantized, name

    def test_a_named_group_goes_before_the_one_for_all(self) -> None:
        tensor = group(weights=FLOAT8 | {"strategy": "tensor"}, targets=["re:.*down_proj"])
        for groups in ((group(), tensor), (tensor, group())):
            found = compressed(*groups)
            scales = [found.scheme_of(name) for name in ("a.down_proj", "a.up_proj")]
            assert [s and s.scales for s in scales] == [Scales.TENSOR, Scales.CHANNEL]

    def test_what_no_group_names_is_not_quantized(self) -> None:
        found = compressed(group(targets=["re:.*mlp"]))
        assert found.scheme_of("model.layers.0.self_attn.q_proj") is None

    def test_entries_that_match_nothing_are_found(self) -> None:
        found = compressed(
            group(targets=["re:.*mlp.*", "re:.*conv"]), ignore=["lm_head", "re:.*up"]
        )
        names = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]
        assert found.unused_ignores(names) == ["lm_head"]
        assert found.unused_targets(names) == ["re:.*conv"]


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ([], "quantization_config is not an object"),
        ({}, "quant_method None is not supported, only compressed-tensors, fbgemm_fp8, fp8"),
        ({"quant_method": "gptq"}, "quant_method 'gptq' is not supported, only compressed"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported, only e4m3"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme 'odd'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size .* two numbers"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "0 is not .* from 1 to 65536"),
        ({"quant_method": "fp8", "weight_block_size": [1 << 40, 1]}, "number from 1 to 65536"),
        ({"quant_method": "fp8", "weight_block_size": [96, 96]}, "96 is not .* a power of two"),
        (
            {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "static"},
            "activation_scheme 'static' is not supported, only dynamic, with a weight_block_size",
        ),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers .* list of names"),
        ({"quant_method": "fp8", "ignored_layers": ["a["]}, "ignored_layers .* can be compiled"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": -1}, "activation_scale_ub -1"),
    ],
)
def test_what_is_not_served_is_refused_by_field(config: Any, complaint: str) -> None:
    with pytest.raises(QuantizationError, match=complaint):
        parse_quantization(config)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": "pack-quantized"}, "format 'pack-quantized' is not supported, only float"),
        ({"config_groups": {}}, "config_groups"),
        ({"config_groups": {"g": group(targets=[])}}, r"config_groups\.g\.targets"),
        ({"config_groups": {"g": group(targets=["re:("])}}, r"g\.targets .* can be compiled"),
        (
            {"config_groups": {"g": group(weights=FLOAT8 | {"num_bits": 4, "type": "int"})}},
            r"g\.weights\.num_bits and type .4 int. is not supported, only 8 float or 8 int",
        ),
        ({"config_groups": {"g": group(weights=None)}}, r"g\.weights None .* an object"),
        ({"config_groups": {"g": group(output_activations=TOKEN)}}, "output_activations"),
        (
            {"config_groups": {"g": group(weights=FLOAT8 | {"strategy": "block"})}},
            r"g\.weights\.block_structure None is not supported, only two numbers",
        ),
        (
            {"config_groups": {"g": group(input_activations=TOKEN | {"strategy": "group"})}},
            r"g\.input_activations\.group_size None",
        ),
        (
            {"config_groups": {"g": group(input_activations=TOKEN | {"dynamic": False})}},
            r"g\.input_activations\.dynamic False",
        ),
        (
            {"config_groups": {"g": group(weights=INT8 | {"symmetric": False})}},
            r"g\.weights\.symmetric False is not supported, only true, of int8",
        ),
        (
            {"config_groups": {"g": group(weights=INT8, input_activations=TOKEN)}},
            r"g\.input_activations\.type 'float8' is not supported, only the weights' int8",
        ),
        (
            {"config_groups": {"g": group(weights=INT8 | {"strategy": "group"})}},
            r"g\.weights\.strategy 'group' is not supported, only tensor or channel",
        ),
        (
            {
                "config_groups": {
                    "g": group(
                        weights=FLOAT8
                        | {"strategy": "group", "group_size": 128, "actorder": "group"}
                    )
                }
            },
            r"g\.weights\.actorder 'group' is not supported, only weight or static",
        ),
        ({"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        ({"transform_config": {"a": 1}}, "transform_config"),
        ({"ignore": [3]}, "ignore"),
    ],
)
def test_of_compressed_tensors_too(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(QuantizationError, match=complaint):
        compressed(**changes)


def model(quantization: dict[str, Any] | None) -> ModelConfig:
    return parse_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "torch_dtype": "bfloat16",
            "quantization_config": quantization,
        }
    )


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_a_model_says_that_the_field_is_its_config_jsons() -> None:
    with pytest.raises(ModelError, match=r"config\.json: quantization_config: quant_method 'awq'"):
        model({"quant_method": "awq"})


def test_tp_that_cuts_a_block_names_the_largest_that_works() -> None:
    check_fit(model(BLOCKS), Intended(tp=8))
    wide = BLOCKS | {"weight_block_size": [512, 128]}
    with pytest.raises(ModelError, match=r"tp 4 would cut blocks of 512x128 .* works is 2$"):
        check_fit(model(wide), Intended(tp=4))


def mixture(quantization: dict[str, Any]) -> ModelConfig:
    return parse_config(
        {
            "architectures": ["Qwen2MoeForCausalLM"],
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "moe_intermediate_size": 768,
            "shared_expert_intermediate_size": 4096,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "vocab_size": 151936,
            "quantization_config": quantization,
        }
    )


def test_blocks_of_experts_are_not_cut_either() -> None:
    """The width of each is spread over `tp / ep` ranks, that of the shared one over all."""
    config = mixture(BLOCKS | {"weight_block_size": [64, 128]})
    check_fit(config, Intended(tp=2))
    check_fit(config, Intended(tp=4, ep=2))
    check_fit(config, Intended(tp=8, ep=8))
    with pytest.raises(ModelError, match=r"tp 4 would cut blocks of 64x128 .* works is 2$"):
        check_fit(config, Intended(tp=4))
    with pytest.raises(ModelError, match=r"tp 8 would cut .* works is 4$"):
        check_fit(config, Intended(tp=8, ep=2))
    alone = BLOCKS | {"weight_block_size": [64, 128], "ignored_layers": [r".*\.experts\.\d+"]}
    check_fit(mixture(alone), Intended(tp=4))
    shared = BLOCKS | {"weight_block_size": [64, 1024]}
    with pytest.raises(ModelError, match=r"tp 8 would cut .*; none works with ep 8$"):
        check_fit(mixture(shared), Intended(tp=8, ep=8))


def test_blocks_of_what_is_left_alone_are_not_cut() -> None:
    """So that a `tp` that divides 4 KV heads of 64 numbers is served beside blocks of 128."""
    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 1000,
    }
    with pytest.raises(ModelError, match=r"tp 4 would cut blocks of 128x128 .* works is 2$"):
        check_fit(parse_config(sizes | {"quantization_config": BLOCKS}), Intended(tp=4))
    kept = BLOCKS | {"modules_to_not_convert": [f"model.layers.{i}.self_attn" for i in range(2)]}
    check_fit(parse_config(sizes | {"quantization_config": kept}), Intended(tp=4))


def compressed_config(*groups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head"],
        "config_groups": {str(index): one for index, one in enumerate(groups)},
        **changes,
    }


PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 1000,
}


@pytest.mark.parametrize(
    ("read", "complaint"),
    [
        (
            lambda: mixture(compressed_config(group(weights=INT8, input_activations=None))),
            r"layers\.0\.mlp\.experts\.0\.gate_proj: experts in int8 are not supported, only in",
        ),
        (
            lambda: mixture(compressed_config(group(), ignore=["lm_head", "re:.*experts.7.down"])),
            r"0\.gate_proj is quantized .* and .*experts\.7\.down_proj is not quantized: they are",
        ),
        (
            lambda: model(compressed_config(group(), ignore=["lm_head", "re:.*k_proj"])),
            r"0\.self_attn\.q_proj is quantized .* and .*k_proj is not quantized: .* alike",
        ),
        (
            lambda: model(compressed_config(group(), ignore=[])),
            r"lm_head is quantized .* with the head among the ignored layers",
        ),
        (
            lambda: model(compressed_config(group(targets=["Linear", "re:.*expert"]))),
            r"targets re:\.\*expert match no projection of the model, such as model\.layers\.0\.",
        ),
        (
            lambda: parse_config(PHI3 | {"intermediate_size": 1088, "quantization_config": BLOCKS}),
            r"0\.mlp\.gate_up_proj: blocks of 128 rows .* have rows of two of its projections",
        ),
        (
            lambda: parse_config(
                {
                    "architectures": ["GptOssForCausalLM"],
                    "hidden_size": 64,
                    "intermediate_size": 48,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 8,
                    "vocab_size": 1000,
                    "quantization_config": {"quant_method": "mxfp4"},
                }
            ),
            r"experts\.0\.down_proj: 48 columns are no multiple of the 32 that share a scale in",
        ),
    ],
)
def test_what_projections_cannot_be_is_known_before_anything_is_fetched(
    read: Callable[[], ModelConfig], complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        read()


def test_a_target_may_be_one_experts_own() -> None:
    """Which another rank holds, perhaps."""
    names = [
        f"model.layers.{layer}.mlp.experts.{i}.{kind}_proj"
        for layer in range(4)
        for i in range(64)
        for kind in ("gate", "up", "down")
    ]
    found = mixture(compressed_config(group(targets=names))).quantization
    assert found is not None
    assert found.scheme_of(names[-1]) is not None
    with pytest.raises(ModelError, match=r"targets model\.layers\.4\.x match no projection"):
        mixture(compressed_config(group(targets=[*names, "model.layers.4.x"])))


def test_an_ignored_router_is_known() -> None:
    left = ["model.layers.1.mlp.gate", "re:.*shared_expert_gate"]
    found = mixture(compressed_config(group(), ignore=["lm_head", *left, "re:.*vision"]))
    assert unused_ignores(found) == ["re:.*vision"]


def test_a_quantized_model_takes_half_the_memory() -> None:
    for config, quantize in ((model(BLOCKS), ""), (model(None), "fp8")):
        check_fit(config, Intended(memory=9 << 30, quantize=quantize))
        with pytest.raises(ModelError, match=r"8\.5 GiB in bfloat16 and float8"):
            check_fit(config, Intended(memory=8 << 30, quantize=quantize))
    with pytest.raises(ModelError, match=r"15\.0 GiB in bfloat16,"):
        check_fit(model(None), Intended(memory=9 << 30))


def test_a_quantized_model_is_not_quantized_anew() -> None:
    with pytest.raises(ModelError, match=r"this one is \(fp8\); set quantize to none"):
        check_fit(model(BLOCKS), Intended(quantize="fp8"))
