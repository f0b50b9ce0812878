"""/v1/chat/completions: a conversation in, OpenAI's events or reply out. Stateless."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from sglang.srt.entrypoints.answer_parts import AnswerDelta, AnswerFormat, AnswerParser, parse
from sglang.srt.entrypoints.openai.chat_messages import template_messages
from sglang.srt.entrypoints.openai.logprobs import LogprobStream, chat_logprobs
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, UsageOfChoices, choice_end
from sglang.srt.entrypoints.request_fields import cache_mode, session_id
from sglang.srt.entrypoints.streams import close, merge
from sglang.srt.entrypoints.tool_request import tool_request
from sglang.srt.managers.tokenizer_manager import Chunk, GenerateRequest, TokenizerManager
from sglang.srt.sampling.logprob_types import TokenLogprob
from sglang.srt.utils.errors import RequestError
from sglang.srt.utils.template_variables import reserved_variable

Event = dict[str, Any]
Chunks = AsyncIterator[tuple[int, Chunk]]


async def serve_chat(req: ChatCompletionRequest, manager: TokenizerManager, model: str) -> AsyncIterator[Event]:
    """Chunks if req.stream, else one whole reply. Choice i is the conversation's i-th answer."""
    request, form = await chat_request(req, manager)
    reply = _Reply(req, form, manager, {"id": request.rid, "created": int(time.time()), "model": model})
    chunks = merge(manager.generate_all(request.copies(req.num_choices)))
    try:
        if req.stream:
            async for event in reply.events(chunks, request.params.skip_special_tokens):
                yield event
        else:
            yield await reply.whole(chunks)
    except RequestError as error:
        if error.param == "structural_tag" and form.tools.tools:
            raise RequestError(f"the grammar of tools: {error.message}", error.status_code, "tools") from None
        raise req.named(error) from None
    finally:
        await close(chunks)


async def chat_request(req: ChatCompletionRequest, manager: TokenizerManager) -> tuple[GenerateRequest, AnswerFormat]:
    """What the engine is asked, and how its answers are read. Raises RequestError."""
    if not req.messages:
        raise RequestError("messages is empty: give at least one", param="messages")
    limit_name = "max_tokens" if req.max_completion_tokens is None else "max_completion_tokens"
    limit = getattr(req, limit_name)
    req = req.with_defaults(manager.sampling_defaults)
    # These checks come before the template's work.
    params, logprobs = req.sampling_params(limit, 1, limit_name), req.logprob_spec()
    kwargs = req.template_variables
    if reserved := reserved_variable(kwargs):
        raise RequestError(
            f"chat_template_kwargs may not hold {reserved}, which the engine sets itself",
            param="chat_template_kwargs",
        )
    # Tools and their grammar may be a megabyte of JSON, which takes tens of milliseconds.
    asked = req.tools, req.tool_choice, req.parallel_tool_calls
    tools = await manager.threads.run(tool_request, *asked) if req.tools else tool_request(*asked)
    server = manager.chat_format
    if tools.choice == "auto" and server.detector is None:
        raise RequestError(
            "this server does not parse tool calls: start it with --tool-call-parser, or set tool_choice to "
            "'required', a function's name or 'none'",
            param="tools",
        )
    messages = template_messages(req.messages, server)
    continued = messages[-1] if req.continue_final_message else None
    shown = {**kwargs, "tools": list(tools.rendered)} if tools.rendered else kwargs
    opens_answer = req.add_generation_prompt is not False
    prompt = await manager.render_chat(messages, shown, continued is not None, opens_answer)
    form = AnswerFormat.of(
        server,
        tools,
        prompt,
        continued,
        separate_reasoning=req.separate_reasoning is not False,
        stream_reasoning=req.stream_reasoning is not False,
    )
    if form.detector is not None or params.grammar is not None:
        params = await manager.threads.run(form.sampling_params, params, manager.token_texts)
    else:
        params = form.sampling_params(params, manager.token_texts)
    request = GenerateRequest(
        prompt=prompt,
        params=params,
        logprobs=logprobs,
        fill_context=limit is None,
        add_special_tokens=False,  # the template writes them
        rid=req.reply_id(),
        extra_key=req.namespace,
        cache=cache_mode(req.cache),
        priority=req.priority,
        session_id=session_id(req.session_id),
        stream=bool(req.stream),
    )
    return request, form


class _Reply:
    """Builds one reply. common: the fields that its events share."""

    def __init__(
        self, req: ChatCompletionRequest, form: AnswerFormat, manager: TokenizerManager, common: Event
    ) -> None:
        self._req = req
        self._form = form
        self._manager = manager
        self._texts = manager.token_texts
        self._common = common
        self._usage = UsageOfChoices(req)

    def _logprobs(self, entries: list[TokenLogprob]) -> Event | None:
        return chat_logprobs(entries, self._texts) if self._req.logprobs else None

    async def whole(self, chunks: Chunks) -> Event:
        choices = {}
        async for index, chunk in chunks:
            parser = self._form.parser(self._texts)
            delta = await parse(parser, chunk, self._manager)
            self._usage.add(index, chunk, parser.reasoning_tokens)
            choices[index] = {
                "index": index,
                "message": _message(delta),
                "logprobs": self._logprobs(chunk.logprobs),
                **_end(parser, chunk),
            }
        return {
            **self._common,
            "object": "chat.completion",
            "choices": [choices[index] for index in sorted(choices)],
            "usage": self._usage.total(),
            **self._usage.extension(),
        }

    async def events(self, chunks: Chunks, skip_special_tokens: bool) -> AsyncIterator[Event]:
        streams: dict[int, LogprobStream] = {}
        parsers: dict[int, AnswerParser] = {}
        # The log-probabilities of tokens whose text is not sent yet.
        held: dict[int, list[TokenLogprob]] = {}
        async for index, chunk in chunks:
            if index not in streams:
                streams[index] = LogprobStream(self._texts, skip_special_tokens)
                parsers[index] = self._form.parser(self._texts)
                held[index] = []
                self._usage.add(index, chunk, parsers[index].reasoning_tokens)
                yield self._event(index, chunk, {"role": "assistant", "content": ""})
            final = chunk.finish_reason is not None
            deltas = _deltas(await parse(parsers[index], chunk, self._manager))
            self._usage.add(index, chunk, parsers[index].reasoning_tokens)
            held[index] += [entry for _, entry in streams[index].take(chunk.logprobs, chunk.text, final)]
            for delta in deltas:
                yield self._event(index, chunk, delta, held[index])
                held[index] = []
            if final:
                yield self._event(index, chunk, {}, held[index], _end(parsers[index], chunk))
        end = {**self._common, "object": "chat.completion.chunk", "choices": []}
        if extension := self._usage.extension():
            yield {**end, "usage": None, **extension}
        if self._req.include_usage:
            yield {**end, "usage": self._usage.total()}

    def _event(
        self,
        index: int,
        chunk: Chunk,
        delta: Event,
        logprobs: list[TokenLogprob] | None = None,
        end: Event | None = None,
    ) -> Event:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(logprobs) if logprobs else None,
            **(end or choice_end(None)),
        }
        return {
            **self._common,
            "object": "chat.completion.chunk",
            "choices": [choice],
            "usage": self._usage.of(index, chunk) if self._req.usage_in_every_chunk else None,
        }


def _end(parser: AnswerParser, chunk: Chunk) -> Event:
    reason = chunk.finish_reason
    return choice_end(reason, None if reason is None else parser.finish_reason(reason))


def _message(delta: AnswerDelta) -> Event:
    """A whole answer."""
    message: Event = {"role": "assistant", "content": delta.content}
    if delta.reasoning:
        message["reasoning_content"] = delta.reasoning
    if delta.calls:
        message["content"] = delta.content or None
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "index": call.index,
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in delta.calls
        ]
    return message


def _deltas(delta: AnswerDelta) -> list[Event]:
    """The events of a chunk, in the order of the answer: reasoning, text, calls."""
    events: list[Event] = []
    if delta.reasoning:
        events.append({"reasoning_content": delta.reasoning})
    if delta.content:
        events.append({"content": delta.content})
    for call in delta.calls:
        part: Event = {"index": call.index, "function": {"arguments": call.arguments}}
        if call.name is not None:
            function = {"name": call.name, "arguments": call.arguments}
            part = {"index": call.index, "id": call.call_id, "type": "function", "function": function}
        events.append({"tool_calls": [part]})
    return events
