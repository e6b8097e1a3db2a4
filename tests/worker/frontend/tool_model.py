"""The demo model's directory with a vocabulary and a template of reasoning and tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}{% for call in message.tool_calls or [] %}{{ "\n" }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def build(
    demo: Path, directory: Path, template: str = TEMPLATE, markers: Sequence[str] = MARKERS
) -> Path:
    """Without weights: for frontends, whose engine is another one."""
    directory.mkdir()
    for file in demo.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in markers])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text())
    config["vocab_size"] = tokenizer.get_vocab_size(with_added_tokens=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(template)
    return directory
