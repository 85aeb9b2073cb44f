"""What is asked and answered, as OpenAI's API has it.

A field that we do not know is refused, and so is one that asks for what we do not do.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvd_client import BadRequest
from kvd_infer.sampler import SamplingParams
from kvd_infer.saved import Int64

R = TypeVar("R", bound="CompletionRequest")

# What the API has and we do not, with the values that ask for nothing. Nulls never do.
_NOT_DONE: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "seed", "n", "ignore_eos")
# Of completions, where nothing is said. A chat's answer may be as long as the model allows.
DEFAULT_MAX_TOKENS = 16
MAX_STOPS = 16

Likeliest: TypeAlias = Annotated[int, Meta(ge=0, le=20)]
Stop: TypeAlias = Annotated[tuple[str, ...], Meta(max_length=MAX_STOPS)]


# --- what is asked ---


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both kinds have in common; what is not said is the engine's to choose.

    `top_k`, `repetition_penalty`, `ignore_eos` and `priority` are ours; `user` is for the client's
    own use.
    """

    model: str
    max_tokens: int | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    top_k: int | UnsetType = UNSET
    repetition_penalty: float | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    n: int | UnsetType = UNSET
    ignore_eos: bool | UnsetType = UNSET
    stop: str | Stop = ()
    priority: Int64 = 0
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""

    @property
    def num_likeliest(self) -> int | None:
        """How many likeliest tokens are wanted beside each; None where no log-probability is."""
        raise NotImplementedError

    def num_wanted(self, num_left: int) -> int:
        """How long the answer may get, of so many tokens that the model has left."""
        raise NotImplementedError

    def params(self, num_left: int) -> SamplingParams:
        """Raises BadRequest for values that cannot be."""
        said = {name: getattr(self, name) for name in _SAMPLING}
        return SamplingParams(
            max_tokens=self.num_wanted(num_left),
            stop=(self.stop,) if isinstance(self.stop, str) else self.stop,
            logprobs=self.num_likeliest,
            **{name: value for name, value in said.items() if value is not UNSET},
        )


class TextRequest(CompletionRequest, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: Likeliest | None = None

    @property
    def num_likeliest(self) -> int | None:
        return self.logprobs

    def num_wanted(self, num_left: int) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is UNSET else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each text or list of ids by itself. Raises BadRequest for a mixture."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [each for each in self.prompt if isinstance(each, int)]
        if len(ids) == len(self.prompt):
            return [ids]
        if ids:
            raise BadRequest("prompt is a list of ids or a list of prompts, not both")
        return [each for each in self.prompt if not isinstance(each, int)]


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str | list[TextPart] = ""
    name: str = ""

    def for_template(self) -> dict[str, str]:
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class ChatRequest(CompletionRequest, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: int | UnsetType = UNSET
    logprobs: bool = False
    top_logprobs: Likeliest = 0

    @property
    def num_likeliest(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs are told with logprobs alone: set logprobs to true")
        return self.top_logprobs if self.logprobs else None

    def num_wanted(self, num_left: int) -> int:
        for said in (self.max_completion_tokens, self.max_tokens):
            if said is not UNSET:
                return said
        return max(num_left, 1)


def read(body: bytes | bytearray, kind: type[R]) -> R:
    """What a body asks. Raises BadRequest, which names what is wrong with it."""
    try:
        fields = _without_nulls(msgspec.json.decode(body, type=dict[str, Any]))
        for name, harmless in _NOT_DONE.items():
            if name in fields and fields.pop(name) not in harmless:
                raise BadRequest(f"{name} is not supported: leave it out", param=name)
        return msgspec.convert(fields, kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise BadRequest(f"the request cannot be read: {error}") from error


def _without_nulls(value: Any) -> Any:
    """A field that is null says as much as one that is not there."""
    match value:
        case dict():
            return {key: _without_nulls(one) for key, one in value.items() if one is not None}
        case list():
            return [_without_nulls(one) for one in value]
        case _:
            return value


# --- what is answered ---


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TextLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None


class TokenLogprob(msgspec.Struct, frozen=True):
    """`bytes` is null for a token that is only a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TokenLogprob] | UnsetType = UNSET


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]


class AnswerMessage(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class Delta(msgspec.Struct, frozen=True):
    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class CompletionReply(msgspec.Struct, frozen=True):
    """An answer, or a chunk of one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice] | list[ChatChoice] | list[ChunkChoice]
    usage: Usage | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "kvd"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Trouble(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None = None


class ErrorReply(msgspec.Struct, frozen=True):
    error: Trouble


class Health(msgspec.Struct, frozen=True):
    """`kvd` says whether the daemon answers, or is not used at all."""

    ready: bool
    kvd: Literal["attached", "away", "unused"]
    requests: int
