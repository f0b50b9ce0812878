"""/v1/responses: a conversation in, OpenAI's typed events or response out. Stateless."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from sglang.srt.entrypoints.answer_blocks import (
    AnswerBlocks,
    Block,
    BlockEnd,
    BlockEvent,
    BlockKind,
    BlockStart,
)
from sglang.srt.entrypoints.answer_parts import AnswerParser, parse
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesRequest
from sglang.srt.entrypoints.openai.serving_chat import chat_request
from sglang.srt.entrypoints.streams import StreamForm, close, encode_named_event
from sglang.srt.managers.tokenizer_manager import Chunk, TokenizerManager
from sglang.srt.utils.errors import RequestError

Event = dict[str, Any]


def error_event(error: RequestError, sequence_number: int = 0) -> Event:
    return {
        "type": "error",
        "sequence_number": sequence_number,
        "code": "server_error" if error.status_code >= 500 else "invalid_request_error",
        "message": error.message,
        "param": error.param,
    }


RESPONSES_STREAM = StreamForm(encode_named_event, end=b"", error=error_event)


async def serve_responses(req: ResponsesRequest, manager: TokenizerManager, model: str) -> AsyncIterator[Event]:
    """Events if req.stream, else one response."""
    request, form = await chat_request(req.chat(), manager)
    response_id = req.rid or f"resp_{uuid.uuid4().hex}"
    sampling = {"temperature": request.params.temperature, "top_p": request.params.top_p}
    common = {"id": response_id, "model": model, **sampling}
    reply = _Reply(req, form.parser(manager.token_texts), manager, common)
    chunks = manager.generate(replace(request, rid=response_id))
    try:
        if req.stream:
            async for event in reply.events(chunks):
                yield event
        else:
            yield await reply.whole(chunks)
    finally:
        await close(chunks)


class _Reply:
    """Builds one response. Owns its finished items and the number of its next event. common: fields of the response
    that are known before its answer."""

    def __init__(self, req: ResponsesRequest, parser: AnswerParser, manager: TokenizerManager, common: Event) -> None:
        self._req = req
        self._parser = parser
        self._manager = manager
        self._common = common
        self._created = int(time.time())
        self._items: list[Event] = []
        self._num_events = 0

    async def whole(self, chunks: AsyncIterator[Chunk]) -> Event:
        blocks = AnswerBlocks()
        last: Chunk | None = None
        async for chunk in chunks:
            last = chunk
            delta = await parse(self._parser, chunk, self._manager)
            for event in blocks.push(delta, chunk.finish_reason is not None):
                if isinstance(event, BlockEnd):
                    self._items.append(self._item(event.block, event.text, _status(chunk)))
        assert last is not None
        return self._response(last)

    async def events(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Event]:
        blocks = AnswerBlocks()
        last: Chunk | None = None
        try:
            async for chunk in chunks:
                if last is None:
                    for kind in ("response.created", "response.in_progress"):
                        yield self._event(kind, response=self._response(None))
                last = chunk
                delta = await parse(self._parser, chunk, self._manager)
                for event in blocks.push(delta, chunk.finish_reason is not None):
                    for made in self._of_block(event, chunk):
                        yield made
        except RequestError as error:
            if last is None:  # the status is not sent yet
                raise
            yield error_event(error, self._num_events)
            return
        if last is not None:
            response = self._response(last)
            yield self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _of_block(self, event: BlockEvent, chunk: Chunk) -> list[Event]:
        block = event.block
        item_id = self._item_id(block)
        place: Event = {"item_id": item_id, "output_index": block.index}
        if isinstance(event, BlockStart):
            added = self._event(
                "response.output_item.added", output_index=block.index, item=self._item(block, None, "in_progress")
            )
            if block.kind is BlockKind.CALL:
                return [added]
            return [
                added,
                self._event("response.content_part.added", **place, content_index=0, part=_part(block, "")),
            ]
        if isinstance(event, BlockEnd):
            item = self._item(block, event.text, _status(chunk))
            self._items.append(item)
            return [
                *self._ends(block, event.text, place),
                self._event("response.output_item.done", output_index=block.index, item=item),
            ]
        if block.kind is BlockKind.CALL:
            return [self._event("response.function_call_arguments.delta", **place, delta=event.text)]
        if block.kind is BlockKind.REASONING:
            return [self._event("response.reasoning_text.delta", **place, content_index=0, delta=event.text)]
        return [self._event("response.output_text.delta", **place, content_index=0, delta=event.text, logprobs=[])]

    def _ends(self, block: Block, text: str, place: Event) -> list[Event]:
        if block.kind is BlockKind.CALL:
            return [
                self._event("response.function_call_arguments.done", **place, name=block.name, arguments=text),
            ]
        if block.kind is BlockKind.REASONING:
            done = self._event("response.reasoning_text.done", **place, content_index=0, text=text)
        else:
            done = self._event("response.output_text.done", **place, content_index=0, text=text, logprobs=[])
        part = _part(block, text)
        return [done, self._event("response.content_part.done", **place, content_index=0, part=part)]

    def _item_id(self, block: Block) -> str:
        prefix = {BlockKind.CALL: "fc", BlockKind.REASONING: "rs", BlockKind.TEXT: "msg"}[block.kind]
        return f"{prefix}_{self._common['id'].removeprefix('resp_')}_{block.index}"

    def _item(self, block: Block, text: str | None, status: str) -> Event:
        """text: None of a block that begins."""
        item: Event = {"id": self._item_id(block), "status": status}
        if block.kind is BlockKind.CALL:
            call = {"call_id": block.call_id, "name": block.name, "arguments": text or ""}
            return {"type": "function_call", **item, **call}
        content = [] if text is None else [_part(block, text)]
        if block.kind is BlockKind.REASONING:
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", **item, "role": "assistant", "content": content}

    def _response(self, last: Chunk | None) -> Event:
        """last: None while the answer is not complete."""
        req = self._req
        status = "in_progress" if last is None else _status(last)
        reasoning = req.reasoning or {}
        return {
            **self._common,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": _why_incomplete(last)} if status == "incomplete" else None,
            "instructions": req.instructions,
            "max_output_tokens": req.max_output_tokens,
            "output": list(self._items),
            "parallel_tool_calls": req.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
            "store": False,
            "text": req.text or {"format": {"type": "text"}},
            "tool_choice": req.tool_choice or "auto",
            "tools": req.tools or [],
            "truncation": "disabled",
            "usage": None if last is None else self._usage(last),
            "user": req.user,
            "metadata": req.metadata or {},
        }

    def _usage(self, last: Chunk) -> Event:
        return {
            "input_tokens": last.prompt_tokens,
            "input_tokens_details": {"cached_tokens": last.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": last.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._parser.reasoning_tokens or 0},
            "total_tokens": last.prompt_tokens + last.completion_tokens,
        }


def _status(chunk: Chunk) -> str:
    reason = chunk.finish_reason
    return "incomplete" if reason is not None and reason.type != "stop" else "completed"


def _why_incomplete(last: Chunk | None) -> str:
    reason = last.finish_reason if last is not None else None
    return "max_output_tokens" if reason is not None and reason.type == "length" else "abort"


def _part(block: Block, text: str) -> Event:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
