"""Small tokenizers of other kinds than the demo model's, built here."""

from __future__ import annotations

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from radixgrove.protocol.text.tokenizer import TokenizerFiles


def llama_like(chat_template: str | None = None) -> TokenizerFiles:
    """Metaspace, byte fallback, BOS by post-processor; `[EOT]` eats the blanks after it."""
    words = [
        "▁Hello",
        "▁world",
        "▁the",
        "▁fox",
        "Hello",
        "world",
        "▁",
        "<",
        "|",
        "e",
        "o",
        "t",
        ">",
    ]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for word in words:
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.Unigram([(w, -float(i)) for w, i in vocabulary.items()], 0, True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [
            AddedToken("<s>", normalized=False),
            AddedToken("</s>", normalized=False),
            AddedToken("[EOT]", normalized=False, rstrip=True),
            AddedToken("[PAD]", normalized=False, lstrip=True),
        ]
    )
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _files(tokenizer, chat_template)


def normalizing(chat_template: str) -> TokenizerFiles:
    """A special token that is looked for in normalized text: `FIN` reads as `fin`."""
    characters = {chr(code): code - 32 for code in range(32, 127)}
    tokenizer = Tokenizer(models.BPE(characters, [], unk_token=" "))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens([AddedToken("[fin]", normalized=True)])
    return _files(tokenizer, chat_template)


def overlapping() -> TokenizerFiles:
    """Special tokens of which one begins, ends or has another."""
    characters = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(characters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = ["<e>", "<e>x", "y<e", "e><e"]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in texts])
    tokenizer.add_tokens([AddedToken("<e>y", normalized=False)])
    return _files(tokenizer, None)


def _files(tokenizer: Tokenizer, chat_template: str | None) -> TokenizerFiles:
    contents = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": "</s>"}).encode(),
    }
    if chat_template is not None:
        contents["chat_template.jinja"] = chat_template.encode()
    return TokenizerFiles(contents)
