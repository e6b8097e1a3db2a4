"""Tokens that several files list: the ids, special tokens and ends that transformers has."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.model.directory import DamagedFileError, ModelDirectory
from radixgrove.protocol.openai.sampling import SamplingDefaults
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.protocol.text.prompts import PromptEncoder
from radixgrove.protocol.text.tokenizer import SpecialTokens, TokenizerFiles
from tests.protocol.model.small_tokenizer import write_tokenizer

QWEN = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
TEXT = "a<|im_start|>user\nhi<|im_end|><|endoftext|> <|tool|>x<|pad|></think> <image>"


def decoder(tokens: dict[str, int], *, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {
        str(number): {"content": text, "special": special, **flags}
        for text, number in tokens.items()
    }


def write_qwen(directory: Path, **config: Any) -> None:
    write_tokenizer(directory, vocabulary=QWEN, **config)


def write_llama(directory: Path, **config: Any) -> None:
    write_tokenizer(directory, added={"<s>": True, "</s>": True, "<|tool|>": False}, **config)


CASES = {
    "all in tokenizer.json": lambda path: write_llama(path, bos_token="<s>", eos_token="</s>"),
    "added_tokens_decoder alone": lambda path: write_qwen(
        path, added_tokens_decoder=decoder(QWEN), eos_token="<|im_end|>"
    ),
    "tokens that are not special": lambda path: write_qwen(
        path, added_tokens_decoder=decoder(QWEN) | decoder({"</think>": 151646}, special=False)
    ),
    "special there, not in tokenizer.json": lambda path: write_llama(
        path, added_tokens_decoder=decoder({"<s>": 256, "</s>": 257, "<|tool|>": 258})
    ),
    "extra_special_tokens, a list": lambda path: write_llama(
        path, extra_special_tokens=["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>"
    ),
    "extra_special_tokens, by name": lambda path: write_llama(
        path, extra_special_tokens={"image_token": "<image>"}, eos_token="</s>"
    ),
    "additional_special_tokens": lambda path: write_llama(
        path,
        additional_special_tokens=[
            "<|im_start|>",
            "<|im_end|>",
        ],
    ),
    "a pad token of its own": lambda path: write_llama(path, pad_token="<|pad|>"),
    "a token as an object": lambda path: write_llama(
        path, eos_token={"__type": "AddedToken", "content": "</s>", "lstrip": False}
    ),
    "null tokens": lambda path: write_llama(
        path, bos_token=None, eos_token="</s>", additional_special_tokens=None
    ),
}


def added_json(path: Path) -> None:
    write_llama(path, eos_token="<|im_end|>")
    (path / "added_tokens.json").write_text('{"<|im_end|>": 259, "<|im_start|>": 260}')
    (path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "<|im_end|>"}')


def old_map(path: Path) -> None:
    write_llama(path, eos_token="</s>", bos_token="<s>")
    (path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')


def map_beside_decoder(path: Path) -> None:
    write_qwen(path, added_tokens_decoder=decoder(QWEN), eos_token="<|im_end|>")
    (path / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')


CASES |= {
    "added_tokens.json": added_json,
    "special_tokens_map.json": old_map,
    "special_tokens_map.json beside added_tokens_decoder": map_beside_decoder,
}


@pytest.mark.parametrize("write", CASES.values(), ids=CASES)
def test_ids_and_special_tokens(write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    files = TokenizerFiles.load(tmp_path)
    ours = files.tokenizer()
    expected = theirs(TEXT, add_special_tokens=False).input_ids
    assert ours.encode(TEXT, add_special_tokens=False).ids == expected
    assert files.vocabulary == theirs.get_vocab()
    special = {token.content for token in theirs.added_tokens_decoder.values() if token.special}
    assert SpecialTokens.of(ours).ids.keys() == special
    assert files.eos_id == theirs.eos_token_id
    assert files.special_texts() == theirs.special_tokens_map


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
    ],
    ids=str,
)
def test_begin_of_text(switches: dict[str, bool], tmp_path: Path) -> None:
    write_llama(tmp_path, bos_token="<s>", eos_token="</s>", **switches)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = TokenizerFiles.load(tmp_path).tokenizer()
    assert ours.encode("hello").ids == theirs("hello").input_ids


@pytest.mark.parametrize("nothing", [None, [], [None]])
@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([7, 8], 9, (7, 8)),
        (None, 9, (9,)),
        (None, [9, 9, 10], (9, 10)),
        (None, None, (257,)),
        (1 << 40, 9, (9,)),
        ([True], 9, (9,)),
    ],
)
def test_the_first_file_that_names_an_end_counts(
    generation: Any, config: Any, expected: tuple[int, ...], nothing: Any, tmp_path: Path
) -> None:
    write_llama(tmp_path, eos_token="</s>")
    ends = (nothing if end is None else end for end in (generation, config))
    for name, content, end in zip(
        ("generation_config.json", "config.json"), ({}, CONFIG), ends, strict=True
    ):
        (tmp_path / name).write_text(json.dumps(content | {"eos_token_id": end}))
    assert ModelDirectory.load(tmp_path).eos_ids == expected


def test_what_a_model_recommends_is_read_but_for_what_no_request_may_have(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert ModelDirectory.load(tmp_path).sampling == SamplingDefaults()
    recommended = {"temperature": 0.6, "top_k": 20, "min_p": None, "top_p": 1.5, "do_sample": True}
    recommended["repetition_penalty"] = "1.1"
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    assert ModelDirectory.load(tmp_path).sampling == SamplingDefaults(temperature=0.6, top_k=20)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[]"),
        ("generation_config.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"one": "<s>"}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {"special": true}}}'),
        ("added_tokens.json", "no"),
    ],
)
def test_a_damaged_file_is_named(name: str, content: str, tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_text(content)
    with pytest.raises((DamagedFileError, ModelError), match=name):
        ModelDirectory.load(tmp_path)


def test_tokens_of_all_files_are_found_in_prompts(tmp_path: Path) -> None:
    write_qwen(tmp_path, added_tokens_decoder=decoder(QWEN))
    encoder = PromptEncoder(TokenizerFiles.load(tmp_path))
    assert encoder.special.ids == QWEN


def test_a_template_of_requests_with_tools_has_a_file_of_its_own(tmp_path: Path) -> None:
    write_llama(tmp_path, chat_template="of the config")
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    files = TokenizerFiles.load(tmp_path)
    assert files.chat_template() == theirs.get_chat_template() == "plain"
    assert files.tool_template() == theirs.get_chat_template(tools=[{}]) == "{{ tools }}"
    assert TokenizerFiles(files.contents).digest == files.digest
    setting = tmp_path / "mine.jinja"
    setting.write_text("mine")
    chosen = TokenizerFiles.load(tmp_path, WorkerSettings(chat_template=str(setting)))
    assert (chosen.chat_template(), chosen.tool_template()) == ("mine", None)


def test_files_are_read_as_python_writes_them(tmp_path: Path) -> None:
    """Its encoder writes NaN and Infinity; an editor may put a byte order mark before them."""
    write_llama(tmp_path, model_max_length=math.inf, eos_token="</s>")
    config = CONFIG | {"time_step_limit": [0.0, math.inf], "aux": math.nan}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8-sig")
    assert ModelDirectory.load(tmp_path).eos_ids == (257,)
