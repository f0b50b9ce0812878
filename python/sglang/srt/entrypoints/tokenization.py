"""/tokenize and /detokenize: texts or a conversation as token ids, and back. Stateless."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import chat_request
from sglang.srt.entrypoints.request_fields import check_num_answers, split_prompts
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.errors import RequestError


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """prompt: one text or several. The fields from messages on are those of a chat."""

    prompt: str | list[str] | None = None
    model: str | None = None
    # Beside messages it is read only where add_generation_prompt is given, and false by default.
    add_special_tokens: bool | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | float | None = None
    reasoning: dict[str, Any] | None = None
    thinking: dict[str, Any] | bool | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None

    def chat(self) -> ChatCompletionRequest:
        shared = set(self.__struct_fields__) & set(ChatCompletionRequest.__struct_fields__)
        return ChatCompletionRequest(**{name: getattr(self, name) for name in shared})


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool | None = True


async def tokenize(req: TokenizeRequest, manager: TokenizerManager) -> bytes:
    """The reply as JSON. For a list of texts, tokens and count are lists too."""
    if (req.prompt is None) == (req.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if req.prompt is None:
        texts = [await _rendered(req.chat(), manager)]
        # The template has written them.
        special = req.add_special_tokens is True and req.add_generation_prompt is not None
    else:
        texts = [req.prompt] if isinstance(req.prompt, str) else req.prompt
        special = req.add_special_tokens is not False
    check_num_answers(len(texts))
    tokens = [await manager.tokenize(text, special) for text in texts]
    counts = [len(ids) for ids in tokens]
    single = not isinstance(req.prompt, list)

    def encode() -> bytes:
        lists = [ids.tolist() for ids in tokens]
        return msgspec.json.encode(
            {
                "tokens": lists[0] if single else lists,
                "count": counts[0] if single else counts,
                "max_model_len": manager.context_length,
            }
        )

    return await manager.threads.run_if_many(sum(counts), encode)


async def _rendered(chat: ChatCompletionRequest, manager: TokenizerManager) -> str:
    """The prompt of a chat."""
    request, _ = await chat_request(chat, manager)
    assert isinstance(request.prompt, str)
    return request.prompt


async def detokenize(req: DetokenizeRequest, manager: TokenizerManager) -> bytes:
    """The reply as JSON. For a list of lists, text is a list too."""
    if not req.tokens:
        return msgspec.json.encode({"text": ""})
    texts = []
    prompts = split_prompts(req.tokens, "tokens")
    check_num_answers(len(prompts))
    for ids in prompts:
        if isinstance(ids, str):
            raise RequestError("tokens must be token ids", param="tokens")
        texts.append(await manager.detokenize(ids, req.skip_special_tokens is not False))
    return msgspec.json.encode({"text": texts if isinstance(req.tokens[0], list) else texts[0]})
