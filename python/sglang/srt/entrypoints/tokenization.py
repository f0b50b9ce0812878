"""/tokenize and /detokenize: one text or several as token ids, and back. Stateless."""

from __future__ import annotations

import msgspec

from sglang.srt.entrypoints.request_fields import check_num_answers, split_prompts
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.errors import RequestError


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str | list[str]
    model: str | None = None
    add_special_tokens: bool | None = True


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool | None = True


async def tokenize(req: TokenizeRequest, manager: TokenizerManager) -> bytes:
    """The reply as JSON. For a list of texts, tokens and count are lists too."""
    texts = [req.prompt] if isinstance(req.prompt, str) else req.prompt
    check_num_answers(len(texts))
    tokens = [await manager.tokenize(text, req.add_special_tokens is not False) for text in texts]
    counts = [len(ids) for ids in tokens]
    single = isinstance(req.prompt, str)

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
