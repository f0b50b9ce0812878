"""/v1/messages: a conversation in, Anthropic's events or message out; and the number of its tokens. Stateless."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec

from sglang.srt.entrypoints.answer_blocks import (
    AnswerBlocks,
    Block,
    BlockDelta,
    BlockEnd,
    BlockEvent,
    BlockKind,
    BlockStart,
    whole_blocks,
)
from sglang.srt.entrypoints.answer_parts import AnswerParser, parse
from sglang.srt.entrypoints.anthropic.protocol import MessagesRequest, error_body
from sglang.srt.entrypoints.openai.serving_chat import chat_request
from sglang.srt.entrypoints.streams import StreamForm, close, encode_named_event
from sglang.srt.managers.tokenizer_manager import Chunk, TokenizerManager
from sglang.srt.utils.errors import RequestError

Event = dict[str, Any]

ANTHROPIC_STREAM = StreamForm(encode_named_event, end=b"", error=error_body)


async def serve_messages(req: MessagesRequest, manager: TokenizerManager, model: str) -> AsyncIterator[Event]:
    """Events if req.stream, else one message."""
    if req.max_tokens is None:
        raise RequestError("max_tokens is missing", param="max_tokens")
    request, form = await chat_request(req.chat(), manager)
    common = {
        "id": req.rid or f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
    }
    parser = form.parser(manager.token_texts)
    chunks = manager.generate(replace(request, rid=common["id"]))
    try:
        if req.stream:
            async for event in _events(req, parser, manager, chunks, common):
                yield event
        else:
            async for chunk in chunks:
                blocks = whole_blocks(await parse(parser, chunk, manager), req.wants_thinking)
                yield {
                    **common,
                    "content": [_block(event.block, event.text) for event in blocks],
                    **_end(req, parser, chunk),
                    "usage": _usage(chunk),
                }
    finally:
        await close(chunks)


async def count_tokens(req: MessagesRequest, manager: TokenizerManager) -> Event:
    chat = msgspec.structs.replace(req.chat(), max_tokens=1)
    request, _ = await chat_request(chat, manager)
    assert isinstance(request.prompt, str)
    return {"input_tokens": len(await manager.tokenize(request.prompt, request.add_special_tokens))}


async def _events(
    req: MessagesRequest, parser: AnswerParser, manager: TokenizerManager, chunks: AsyncIterator[Chunk], common: Event
) -> AsyncIterator[Event]:
    blocks = AnswerBlocks(req.wants_thinking)
    has_begun = False
    async for chunk in chunks:
        if not has_begun:
            has_begun = True
            empty: Event = {"content": [], "stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": {**common, **empty, "usage": _usage(chunk)}}
        final = chunk.finish_reason is not None
        for event in blocks.push(await parse(parser, chunk, manager), final):
            yield _block_event(event)
        if final:
            yield {"type": "message_delta", "delta": _end(req, parser, chunk), "usage": _usage(chunk)}
            yield {"type": "message_stop"}


def _block_event(event: BlockEvent) -> Event:
    index = event.block.index
    if isinstance(event, BlockStart):
        return {"type": "content_block_start", "index": index, "content_block": _block(event.block, "")}
    if isinstance(event, BlockEnd):
        return {"type": "content_block_stop", "index": index}
    return {"type": "content_block_delta", "index": index, "delta": _delta(event)}


def _delta(event: BlockDelta) -> Event:
    if event.block.kind is BlockKind.CALL:
        return {"type": "input_json_delta", "partial_json": event.text}
    if event.block.kind is BlockKind.REASONING:
        return {"type": "thinking_delta", "thinking": event.text}
    return {"type": "text_delta", "text": event.text}


def _block(block: Block, text: str) -> Event:
    if block.kind is BlockKind.CALL:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(text)}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _input(arguments: str) -> Any:
    """An answer that is cut at its limit may end within its arguments."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _end(req: MessagesRequest, parser: AnswerParser, chunk: Chunk) -> Event:
    reason = chunk.finish_reason
    assert reason is not None
    name, sequence = "end_turn", None
    if reason.type == "length":
        name = "max_tokens"
    elif reason.type == "abort":  # a client may send back what it has, to go on from there
        name = "pause_turn"
    elif parser.finish_reason(reason) == "tool_calls":
        name = "tool_use"
    elif reason.matched in (req.stop_sequences or ()):
        name, sequence = "stop_sequence", reason.matched
    return {"stop_reason": name, "stop_sequence": sequence}


def _usage(chunk: Chunk) -> Event:
    """Anthropic counts what was read from the cache apart."""
    return {
        "input_tokens": chunk.prompt_tokens - chunk.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": chunk.cached_tokens,
        "output_tokens": chunk.completion_tokens,
    }
