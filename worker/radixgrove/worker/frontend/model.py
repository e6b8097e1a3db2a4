"""What a frontend knows of the model it serves."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from radixgrove.protocol.blocks import TOKEN_BYTES
from radixgrove.protocol.formats.shapes import Calls, Channels, TaggedBody
from radixgrove.protocol.model.directory import ModelDirectory
from radixgrove.protocol.openai.requests import ChatRequest, ModelLimits, Request
from radixgrove.protocol.openai.responses import ModelObject
from radixgrove.protocol.openai.sampling import SamplingDefaults
from radixgrove.protocol.openai.tools import ToolMode
from radixgrove.protocol.settings import SamplingSource, WorkerSettings
from radixgrove.protocol.text.prefix_cache import PrefixCache
from radixgrove.protocol.text.prompts import EncodedPrompt, PromptEncoder
from radixgrove.protocol.text.tokenizer import TokenizerFiles
from radixgrove.worker.frontend.call_ids import NewIds
from radixgrove.worker.frontend.call_reader import Properties
from radixgrove.worker.frontend.call_rules import Thoughts
from radixgrove.worker.frontend.detokenize import Vocabulary
from radixgrove.worker.frontend.markers import Markers
from radixgrove.worker.frontend.output import OutputParser
from radixgrove.worker.frontend.structure import Output

_TAIL = 16  # tokens of a prompt in which a block of reasoning may begin


@dataclass(frozen=True)
class ServedModel:
    """One model under its names, the first of which is its id."""

    names: tuple[str, ...]
    limits: ModelLimits
    eos_ids: tuple[int, ...]
    fingerprint: str
    created: int
    files: TokenizerFiles
    encoder: PromptEncoder
    vocabulary: Vocabulary
    markers: Markers

    @classmethod
    def load(cls, model_dir: Path, settings: WorkerSettings) -> ServedModel:
        """Read configuration and tokenizer; no weights.

        Raises:
            ValueError: a file is missing or malformed, or the model cannot be served.
        """
        directory = ModelDirectory.load(model_dir, settings)
        config, files = directory.config, directory.tokenizer
        encoder = PromptEncoder(files, cache=PrefixCache(settings.prompt_cache_bytes))
        vocabulary = Vocabulary(encoder.tokenizer, config.vocab_size)
        longest = config.max_position_embeddings
        names = tuple(settings.served_model_name) or (model_dir.name,)
        types = f"{settings.dtype}\0{settings.kv_dtype}"
        identity = f"{names[0]}\0{settings.weight_version}\0{types}\0{files.digest}"
        return cls(
            names=names,
            limits=ModelLimits(
                max_model_len=min(longest, settings.max_model_len or longest),
                vocab_size=config.vocab_size,
                defaults=directory.sampling
                if settings.sampling_defaults is SamplingSource.MODEL
                else SamplingDefaults(),
            ),
            eos_ids=directory.eos_ids,
            fingerprint="fp_" + sha256(identity.encode()).hexdigest()[:12],
            created=int(time.time()),
            files=files,
            encoder=encoder,
            vocabulary=vocabulary,
            markers=Markers(encoder.format, encoder.tokenizer, vocabulary.special_ids),
        )

    def offered(self, request: Request) -> Properties | None:
        """Tools that an answer may call, with types of their arguments where it takes these to read
        them; None: calls are text."""
        tools = request.tools if isinstance(request, ChatRequest) else None
        calls = self.encoder.format.calls
        if tools is None or tools.mode is ToolMode.NONE or calls is None:
            return None
        tagged = isinstance(calls, Calls) and isinstance(calls.body, TaggedBody)
        return {tool.name: tool.argument_types if tagged else {} for tool in tools.offered}

    def output(
        self, request: Request, prompt: EncodedPrompt, offered: Properties | None
    ) -> Output | None:
        """What takes a new choice's output apart; None: all of it is content."""
        form = self.encoder.format
        if not isinstance(request, ChatRequest):
            return None
        if form.reasoning is None and offered is None and not isinstance(form.calls, Channels):
            return None
        tools = request.tools
        parser = OutputParser(
            form,
            self.markers,
            offered=offered,
            new_id=NewIds(form, request.messages),
            in_reasoning=self.thoughts_of(request, prompt) is Thoughts.OPEN,
            skip_special_tokens=request.generation.skip_special_tokens,
        )
        # OpenAI's own oddity: a call that was asked for by name ends an answer like a text.
        mode = None if tools is None else tools.mode
        asked = offered is not None and mode in (ToolMode.REQUIRED, ToolMode.NAMED)
        return Output(
            parser,
            self.markers,
            called_reason="stop" if mode is ToolMode.NAMED else "tool_calls",
            show_reasoning=request.include_reasoning,
            # Messages say in their headers what they are: a cut call never reads as content.
            calls_alone=asked and not isinstance(form.calls, Channels),
            custom=() if tools is None else {tool.name for tool in tools.offered if tool.custom},
        )

    def thoughts_of(self, request: ChatRequest, prompt: EncodedPrompt) -> Thoughts:
        """Whether the prompt ends right behind what begins a block of reasoning, or ends one; if it
        ends in what a client wants continued, whether one is open there."""
        reasoning = self.encoder.format.reasoning
        if reasoning is None:
            return Thoughts.NONE
        begin, end = reasoning.markers
        known = self.markers.ids
        count = len(prompt) if request.continue_final_message else _TAIL
        ids = array("i", prompt.token_ids[-count * TOKEN_BYTES :])
        if request.continue_final_message and begin in known and end in known:
            both = (known[begin], known[end])
            last = next((token for token in reversed(ids) if token in both), None)
            states = {known[begin]: Thoughts.OPEN, known[end]: Thoughts.CLOSED}
            return Thoughts.NONE if last is None else states[last]
        text: str = self.encoder.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        for marker, state in ((begin, Thoughts.OPEN), (end, Thoughts.CLOSED)):
            # Where a marker is a token, a text that reads the same is none.
            if text.rstrip().endswith(marker) and known.get(marker, ids[-1]) in ids:
                return state
        return Thoughts.NONE

    def objects(self, limits: ModelLimits) -> list[ModelObject]:
        """As `/v1/models` lists them, aliases after the id."""
        return [
            ModelObject(
                id=name,
                created=self.created,
                max_model_len=limits.max_model_len,
                root=None if name == self.names[0] else self.names[0],
                output_format=self.files.format.name,
                capabilities=self.files.capabilities,
            )
            for name in self.names
        ]
