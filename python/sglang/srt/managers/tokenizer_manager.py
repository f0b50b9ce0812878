"""The front of the engine, in the HTTP process: text in, text out. Owns every request from its arrival to its end.

It has prompts tokenised, checks lengths, numbers requests, and passes pieces of text to the request's caller. It
tells the scheduler when the caller has left. All methods belong to one event loop. It knows no HTTP: it raises
RequestError.

    generate() --TokenizedGenerateReqInput--> scheduler -> detokenizer --BatchStrOutput--> _on_output -> generate()
    closed early, or ended by a stop string: AbortReq --> scheduler
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
import numpy as np

from sglang.srt.constrained.grammar_checker import GrammarChecker
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchStrOutput,
    BlockNaming,
    ControlReqOutput,
    FinishReason,
    PromptKeys,
    ReqTimes,
    RequestTimesOutput,
    SchedulerReady,
    StrOutput,
    TokenizedGenerateReqInput,
    bytes_to_ids,
    decode_to_tokenizer,
    encode,
    ids_to_bytes,
)
from sglang.srt.managers.prefix_sampler import PrefixSampler
from sglang.srt.managers.schedule_policy import PRIORITIES
from sglang.srt.managers.scheduler_control import SchedulerControl
from sglang.srt.managers.tokenizer_threads import TokenizerThreads
from sglang.srt.mem_cache.block_keys import BlockKeys
from sglang.srt.observability.history import StateHistory
from sglang.srt.observability.metrics_collector import MetricsCollector
from sglang.srt.observability.trace import NO_TRACE, GeneratedTrace, Tracer
from sglang.srt.parser.chat_format import ChatFormat, find_roles_of_parts
from sglang.srt.sampling.logprob_types import LogprobSpec, TokenLogprob
from sglang.srt.sampling.sampling_params import GrammarSpec, SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.chat_template import all_chat_templates
from sglang.srt.utils.errors import RETRY_AFTER_S, RequestError
from sglang.srt.utils.log import REQUEST_ID
from sglang.srt.utils.token_texts import TokenTexts

logger = logging.getLogger(__name__)

_METRICS_TIMEOUT_S = 0.8
# Of a reply that refuses a request because the queue is full, in seconds.
_MAX_RETRY_AFTER_S = 60
# Of tries to flush the cache.
_FLUSH_INTERVAL_S = 0.02
_LONGEST_WAIT_S = 3600.0
# The weight of the newest time in the mean of times in the queue.
_QUEUE_TIME_WEIGHT = 0.1

# Outputs of one step that are handed to their requests before other clients have a turn. Each takes some 40 us.
_OUTPUTS_AT_ONCE = 128

# Ids that numpy converts in a few milliseconds, in which no other thread runs.
_IDS_AT_ONCE = 1 << 16


def _as_array(ids: Sequence[int], name: str) -> np.ndarray:
    """ids as int64. Raises RequestError that names the field if they are no whole numbers of 64 bits."""
    array = np.empty(len(ids), np.int64)
    try:
        for start in range(0, len(ids), _IDS_AT_ONCE):
            array[start : start + _IDS_AT_ONCE] = np.array(ids[start : start + _IDS_AT_ONCE], dtype=np.int64)
    except (OverflowError, TypeError, ValueError):
        what = "the prompt's token ids" if name == "input_ids" else name
        raise RequestError(f"{what} must be whole numbers of 64 bits", param=name) from None
    return array


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """A request of one prompt and one answer."""

    # Text or token ids.
    prompt: str | Sequence[int]
    params: SamplingParams
    logprobs: LogprobSpec | None = None
    # The hidden state behind the prompt is wanted, see `Chunk.embedding`.
    is_embedding: bool = False
    # Generate up to the context's end instead of max_new_tokens.
    fill_context: bool = False
    add_special_tokens: bool = True
    # The client's name for the request, by which `abort` finds it. Several requests may have the same.
    rid: str | None = None
    extra_key: str = ""
    # See `TokenizedGenerateReqInput`.
    cache: str = ""
    priority: int | None = None
    session_id: str = ""
    stream: bool = False
    # Of the server itself: it takes no place in the queue.
    is_health_check: bool = False

    def copies(self, n: int) -> list[GenerateRequest]:
        """n requests for one prompt, for n answers. If there is a seed, they use seed, seed + 1 and so on."""
        seed = self.params.sampling_seed
        if seed is None:
            return [self] * n
        seeds = [(seed + i + (1 << 63)) % (1 << 64) - (1 << 63) for i in range(n)]
        return [replace(self, params=msgspec.structs.replace(self.params, sampling_seed=each)) for each in seeds]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The part of an answer that is new since the chunk before."""

    rid: str
    text: str
    output_ids: list[int]
    # Set in the last chunk.
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_tokens_details: Mapping[str, int]
    # In the last chunk.
    computed_tokens_details: Mapping[str, int]
    # Since the request's arrival.
    latency_s: float
    # One per output id, if requested.
    logprobs: list[TokenLogprob]
    # In the first chunk, if requested.
    prompt_logprobs: list[TokenLogprob]
    # float32 bytes of a vector of length 1, in the last chunk, if requested.
    embedding: bytes


@dataclass(kw_only=True)
class ReqState:
    """A request that is under way."""

    # The name in messages. It is always new, because a client may reuse its own name before the engine has forgotten
    # it.
    rid: str
    # The client's names for it: its `rid`, else the x-request-id.
    client_rid: str | None
    request_id: str
    stream: bool
    is_health_check: bool
    priority: int
    # Seconds of a monotonic clock.
    arrived: float
    # When the scheduler was sent the request; None before.
    sent: float | None = None
    # What it was sent, and the ids of the answer so far, for the sample of prefixes; None: it is not sampled.
    prompt: TokenizedGenerateReqInput | None = None
    answer: list[bytes] = field(default_factory=list)
    # A client requested the end, so that the abort is an answer and no error.
    aborting: bool = False
    # When the first token was known and the last output came, in seconds of the same clock.
    first: float | None = None
    last: float | None = None
    times: ReqTimes | None = None
    # What the trace tells of the answer.
    last_output: StrOutput | None = None
    unread: list[StrOutput] = field(default_factory=list)
    unread_tokens: int = 0
    # Set when there is something to read.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    finished: bool = False
    error: RequestError | None = None


def _timed_out(timeout_s: float) -> RequestError:
    return RequestError(f"the answer was not complete after {timeout_s:g} s, the limit of this server", 504)


def _trace_of(state: ReqState, req: GenerateRequest) -> GeneratedTrace:
    output, reason = state.last_output, None
    if output is not None and output.finish_reason is not None:
        reason = output.finish_reason.type
    return GeneratedTrace(
        rid=req.rid or state.rid,
        arrived=state.arrived,
        sent=state.sent,
        first=state.first,
        last=state.last,
        ended=time.perf_counter(),
        params=req.params,
        prompt_tokens=output.prompt_tokens if output is not None else 0,
        completion_tokens=output.completion_tokens if output is not None else 0,
        cached_tokens=output.cached_tokens_details if output is not None else {},
        finish_reason=state.error.message if state.error is not None else reason or "abort",
        is_error=state.error is not None,
        times=state.times,
    )


class _Together:
    """Requests that wait for each other."""

    def __init__(self, number: int) -> None:
        self._missing = number
        self._complete = asyncio.Event()
        self._has_begun = False

    def comes_first(self) -> bool:
        """Whether no other of the requests has asked this before."""
        first, self._has_begun = not self._has_begun, True
        return first

    async def wait(self) -> None:
        """Wait until `number` requests have come here. They go on in the order in which they came."""
        self._missing -= 1
        if self._missing > 0:
            await self._complete.wait()
        else:
            self._complete.set()
            await asyncio.sleep(0)


class TokenizerManager:
    def __init__(
        self,
        server_args: ServerArgs,
        *,
        tokenizer: Any,
        vocab_size: int,
        context_length: int,
        send: Callable[[bytes], Any],
        metrics: MetricsCollector,
        grammars: GrammarChecker | None = None,
        sampling_defaults: Mapping[str, float] = {},
        tracer: Tracer = NO_TRACE,
    ) -> None:
        """grammars: None refuses requests that have one. sampling_defaults: of chats that leave the fields
        out. send: passes one encoded message to the scheduler's socket, without blocking."""
        self._args = server_args
        self._tokenizer = tokenizer
        self.threads = TokenizerThreads(tokenizer, metrics.prompt_tokens_reused)
        self.token_texts = TokenTexts(tokenizer)
        self.chat_format = ChatFormat.of(
            all_chat_templates(tokenizer),
            server_args.tool_call_parser,
            server_args.reasoning_parser,
            find_roles_of_parts(self._render) if getattr(tokenizer, "chat_template", None) else frozenset(),
        )
        for flag, name, found in (
            ("--tool-call-parser", server_args.tool_call_parser, self.chat_format.detector),
            ("--reasoning-parser", server_args.reasoning_parser, self.chat_format.reasoning),
        ):
            if name is not None and found is None:
                logger.warning("%s auto finds no format in the model's chat template: name one", flag)
        self.sampling_defaults = sampling_defaults
        self._vocab_size = vocab_size
        self.context_length = context_length
        self._send = send
        self.metrics = metrics
        self._grammars = grammars
        self._tracer = tracer
        # The mean time in the queue, of late; None before the first.
        self._queue_time_s: float | None = None
        self._random = (
            random.Random(server_args.random_seed) if server_args.random_seed is not None else random.Random()
        )
        self._states: dict[str, ReqState] = {}
        self._num_active = 0
        self._num_begun = 0
        # The requests among them without a token so far.
        self._num_waiting = 0
        self._idle = asyncio.Event()
        self._idle.set()
        # Everything that is asked of the scheduler beside requests.
        self.control = SchedulerControl(send, self.threads.encoder.forget)
        self._refusal: RequestError | None = None
        self._is_leaving = False
        # Set by every token, for those who clear it and wait.
        self.token_came = asyncio.Event()
        self.ready: asyncio.Future[SchedulerReady] = asyncio.get_running_loop().create_future()
        # How storage names blocks; None while there is none.
        self._names: BlockKeys | None = None
        self.prefixes = PrefixSampler()
        self.history = StateHistory(metrics.recent)

    # Requests

    def generate_all(self, requests: Sequence[GenerateRequest]) -> list[AsyncIterator[Chunk]]:
        """`generate` for the requests of one body, to be read at the same time. No request is sent before all are
        found valid. The reader of the first error closes the others."""
        together = _Together(len(requests))
        return [self.generate(req, together) for req in requests]

    async def generate(self, req: GenerateRequest, together: _Together | None = None) -> AsyncIterator[Chunk]:
        """Pieces of the answer if req.stream, else one piece. An early close aborts the request. together: the
        requests that are sent with this one. Raises RequestError, also in mid-stream."""
        if self._refusal is not None:
            raise self._refusal
        priority = self._priority_of(req)
        if not req.is_health_check and (together is None or together.comes_first()):
            # A body's requests find the queue full together, or not at all: tried again, it would be as long.
            self._take_place_in_queue(priority)
        state = ReqState(
            rid=uuid.uuid4().hex,
            client_rid=req.rid,
            request_id=REQUEST_ID.get(),
            stream=req.stream,
            is_health_check=req.is_health_check,
            priority=priority,
            arrived=time.perf_counter(),
        )
        self._states[state.rid] = state
        self._num_active += 1
        self._num_begun += 1
        self._num_waiting += not state.is_health_check
        self._idle.clear()
        timeout_s = self._args.request_timeout
        timer = None
        if timeout_s is not None:
            timer = asyncio.get_running_loop().call_later(timeout_s, self._time_out, state, timeout_s)
        try:
            await self._send_to_scheduler(state, req, together)
            while True:
                await state.changed.wait()
                state.changed.clear()
                if state.error is not None:
                    raise state.error
                chunk = self._read(state, req.rid or state.rid)
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            if timer is not None:
                timer.cancel()
            del self._states[state.rid]
            if state.sent is not None and not state.finished:
                self._send(encode(AbortReq(rid=state.rid)))
                self.metrics.aborted()
                if state.error is None or state.error is not self._refusal:  # that one has a line of its own
                    why = state.error.message if state.error is not None else "its client left"
                    num_tokens = state.last_output.completion_tokens if state.last_output is not None else 0
                    logger.info("aborted after %d tokens: %s", num_tokens, why)
            self._num_active -= 1
            self._num_waiting -= state.first is None and not state.is_health_check
            if self._num_active == 0:
                self._idle.set()
            self._tracer.generated(_trace_of(state, req))

    def _priority_of(self, req: GenerateRequest) -> int:
        args = self._args
        if req.priority is None:
            return args.default_priority_value if args.enable_priority_scheduling else 0
        if req.priority not in PRIORITIES:
            raise RequestError(f"priority is {req.priority}, but it must be a 32-bit number", param="priority")
        if args.abort_on_priority_when_disabled and not args.enable_priority_scheduling:
            raise RequestError(
                "this server takes no priorities: leave priority out, or start it with --enable-priority-scheduling",
                param="priority",
            )
        return req.priority

    def _take_place_in_queue(self, priority: int) -> None:
        """Raises RequestError if the queue is full. A waiting request of lower priority leaves it first."""
        limit = self._args.max_queued_requests
        if limit is None or self._num_waiting < limit:
            return
        full = f"the queue is full ({limit} requests wait)"
        rank = self._rank_of
        waiting = [
            each
            for each in self._states.values()
            if each.first is None and each.error is None and not each.is_health_check
        ]
        # Of equals the one that came last.
        last = max(reversed(waiting), key=lambda each: rank(each.priority), default=None)
        if last is None or not self._args.enable_priority_scheduling or rank(last.priority) <= rank(priority):
            raise RequestError(f"{full}: try again later", 503, retry_after_s=self._retry_after_s())
        last.error = RequestError(
            f"{full}, and one of higher priority took the place of this one: try again later",
            503,
            retry_after_s=self._retry_after_s(),
        )
        last.changed.set()

    def _rank_of(self, priority: int) -> int:
        """The least goes first."""
        return priority if self._args.schedule_low_priority_values_first else -priority

    def _retry_after_s(self) -> int:
        """What requests wait in the queue of late: then those that wait now will have started."""
        mean = RETRY_AFTER_S if self._queue_time_s is None else self._queue_time_s
        return max(1, min(math.ceil(mean), _MAX_RETRY_AFTER_S))

    async def _send_to_scheduler(self, state: ReqState, req: GenerateRequest, together: _Together | None) -> None:
        try:
            async with asyncio.timeout(self._args.request_timeout):
                message = await self._tokenized(state.rid, req)
                if together is not None:
                    await together.wait()
        except TimeoutError:
            raise state.error or _timed_out(self._args.request_timeout or 0.0) from None
        if self._refusal is not None:  # set while the prompt was tokenised
            raise self._refusal
        if state.error is not None:
            raise state.error
        self._send(encode(message))
        state.sent = time.perf_counter()
        if not message.cache and not message.is_embedding:
            state.prompt = message
            self.prefixes.note_prompt(message.extra_key, np.frombuffer(message.input_ids, np.int32))
        if state.aborting:
            self._send(encode(AbortReq(rid=state.rid)))

    def _sample_answer(self, prompt: TokenizedGenerateReqInput, answer: bytes) -> None:
        """The last token of an answer is not in the cache."""
        ids = np.frombuffer(prompt.input_ids + answer[:-4], np.int32)
        self.prefixes.note_answer(prompt.extra_key, ids, len(prompt.input_ids) // 4)

    @staticmethod
    def _time_out(state: ReqState, timeout_s: float) -> None:
        if not state.finished and state.error is None:
            state.error = _timed_out(timeout_s)
            state.changed.set()

    @staticmethod
    def _read(state: ReqState, rid: str) -> Chunk:
        outputs, state.unread, state.unread_tokens = state.unread, [], 0
        last = outputs[-1]
        return Chunk(
            rid=rid,
            text="".join(output.text for output in outputs),
            output_ids=bytes_to_ids(b"".join(output.output_ids for output in outputs)).tolist(),
            finish_reason=last.finish_reason,
            prompt_tokens=last.prompt_tokens,
            completion_tokens=last.completion_tokens,
            cached_tokens=last.cached_tokens,
            cached_tokens_details=last.cached_tokens_details,
            computed_tokens_details=last.computed_tokens_details,
            latency_s=time.perf_counter() - state.arrived,
            logprobs=[entry for output in outputs for entry in output.logprobs],
            prompt_logprobs=[entry for output in outputs for entry in output.prompt_logprobs],
            embedding=last.embedding,
        )

    async def _tokenized(self, rid: str, req: GenerateRequest) -> TokenizedGenerateReqInput:
        params, logprobs = req.params, req.logprobs
        has_answer = req.fill_context or params.max_new_tokens > 0
        ids = await self.prompt_ids(req.prompt, req.add_special_tokens, req.extra_key, has_answer)
        max_new_tokens = self._max_new_tokens(len(ids), None if req.fill_context else params.max_new_tokens)
        if params.min_new_tokens > max_new_tokens:
            raise RequestError(
                f"the answer is to have at least {params.min_new_tokens} tokens, but {max_new_tokens} at most: lower "
                "the minimum or raise the maximum"
            )
        grammar_lane = 0 if params.grammar is None else await self._check_grammar(params.grammar)
        seed = self._random.getrandbits(31) if params.sampling_seed is None else params.sampling_seed
        stop_token_ids = self._stop_ids(params.stop_token_ids)
        self._check_vocabulary("logit_bias", tuple(params.logit_bias))
        if logprobs is not None:
            self._check_vocabulary("token_ids_logprob", logprobs.token_ids)
            if (logprobs.prompt_from or 0) > len(ids):
                raise RequestError(
                    f"logprob_start_len is {logprobs.prompt_from}, but the prompt has only {len(ids)} tokens",
                    param="logprob_start_len",
                )
        return TokenizedGenerateReqInput(
            rid=rid,
            input_ids=ids_to_bytes(ids),
            sampling_params=msgspec.structs.replace(
                params, max_new_tokens=max_new_tokens, sampling_seed=seed, stop_token_ids=stop_token_ids
            ),
            extra_key=req.extra_key,
            cache=req.cache,
            priority=self._priority_of(req),
            session_id=req.session_id,
            stream=req.stream,
            logprobs=logprobs,
            is_embedding=req.is_embedding,
            prompt_keys=await self._prompt_keys(req, ids),
            grammar_lane=grammar_lane,
        )

    async def prompt_ids(
        self, prompt: str | Sequence[int], add_special_tokens: bool, namespace: str, has_answer: bool = True
    ) -> np.ndarray:
        """The ids of a prompt. Raises RequestError if the model does not have them, or they are too many."""
        if isinstance(prompt, str):
            ids = await self._text_ids(prompt, add_special_tokens, namespace, has_answer)
        else:
            self.check_prompt_length(len(prompt), has_answer)  # before looking at millions of ids
            ids = _as_array(prompt, "input_ids")
        self._check_vocabulary("input_ids", ids)
        return ids

    async def _check_grammar(self, spec: GrammarSpec) -> int:
        """The lane of the checker that it took."""
        if self._grammars is None:
            raise RequestError(f"{spec.kind} is not served: the server runs with --grammar-backend none", 501)
        return await self._grammars.check(spec)

    async def _prompt_keys(self, req: GenerateRequest, ids: np.ndarray) -> PromptKeys | None:
        """The scheduler would take 3 us per block, in which it does nothing else."""
        names = self._names
        if names is None or len(ids) < names.block_tokens or req.cache == "bypass":
            return None
        return await self.threads.run(PromptKeys.make, names, req.extra_key, ids.astype(np.int32, copy=False))

    def _check_vocabulary(self, name: str, tokens: Sequence[int] | np.ndarray) -> None:
        # An array at once where it is long; integers of any size where a client named them one by one.
        if isinstance(tokens, np.ndarray):
            places = np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))[:1].tolist()
        else:
            places = [i for i, token in enumerate(tokens) if not 0 <= token < self._vocab_size]
        if places:
            at = places[0]
            raise RequestError(
                f"{name} holds {tokens[at]} at position {at}, which is not in the model's vocabulary of "
                f"{self._vocab_size}",
                param=name,
            )

    def _stop_ids(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Those that the model has: the others never come. Raises RequestError for a negative one."""
        if (least := min(tokens, default=0)) < 0:
            raise RequestError(f"stop_token_ids holds {least}, which is no token id", param="stop_token_ids")
        return tuple(token for token in tokens if token < self._vocab_size)

    def _prompt_limit(self) -> tuple[int, str]:
        """The most tokens of a prompt and its answer, and the reason for it."""
        ready = self.ready.result()
        if ready.max_req_input_len + 1 < self.context_length:
            limit = ready.max_req_input_len + 1
            return limit, f"the {limit} tokens that the KV cache can hold for one request"
        return self.context_length, f"the model's context of {self.context_length} tokens"

    def check_prompt_length(self, num_tokens: int, has_answer: bool, or_more: str = "") -> None:
        """Raises RequestError for a prompt of no tokens, and for one that leaves no room for its answer."""
        if num_tokens == 0:
            raise RequestError("the prompt is empty: give at least one token")
        limit, what = self._prompt_limit()
        longest = limit - 1 if has_answer else max(limit - 1, min(limit, self.ready.result().max_unanswered_len))
        if num_tokens > longest:
            why = "which leaves no room for an answer in" if has_answer else f"but at most {longest} fit into"
            raise RequestError(f"the prompt has {num_tokens} tokens{or_more}, {why} {what}")

    def check_answer_length(self, text: str) -> None:
        """Raises RequestError for a text that is too long to be an answer."""
        if self.threads.encoder.min_tokens(text) > self.context_length:
            raise RequestError(
                f"the text is longer than any answer in the model's context of {self.context_length} tokens",
                param="text",
            )

    def _max_new_tokens(self, prompt_tokens: int, wanted: int | None) -> int:
        self.check_prompt_length(prompt_tokens, has_answer=wanted != 0)
        limit, what = self._prompt_limit()
        if wanted is None:
            # Peers lend room for an answer only where the request asks for one of that length.
            unlent = self.ready.result().max_unlent_len
            return min(limit, unlent if prompt_tokens < unlent else limit) - prompt_tokens
        if prompt_tokens + wanted > limit:
            raise RequestError(
                f"{prompt_tokens} tokens of prompt and {wanted} of answer are over {what}: "
                f"shorten the prompt or ask for at most {limit - prompt_tokens} tokens"
            )
        return wanted

    async def _text_ids(self, text: str, add_special_tokens: bool, namespace: str, has_answer: bool) -> np.ndarray:
        """Raises RequestError for a text that is too long: where its characters prove it, before tokenising."""
        if (least := self.threads.encoder.min_tokens(text)) > 0:
            self.check_prompt_length(least, has_answer, " or more")
        limit, _ = self._prompt_limit()
        encoded = await self.threads.encode_shared(text, add_special_tokens, namespace, limit)
        self.check_prompt_length(encoded.num_tokens, has_answer)
        assert encoded.ids is not None
        return encoded.ids

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        encoded = await self.threads.encode(text, add_special_tokens)
        assert encoded.ids is not None
        return encoded.ids

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        def run() -> str:
            self._check_vocabulary("tokens", _as_array(ids, "tokens"))
            return self.threads.encoder.decode(ids, skip_special_tokens)

        return await self.threads.run(run)

    async def token_spans(self, prompt: str, add_special_tokens: bool) -> list[tuple[int, int]] | None:
        """See `TextEncoder.token_spans`."""
        return await self.threads.run(self.threads.encoder.token_spans, prompt, add_special_tokens)

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        kwargs: Mapping[str, Any],
        continue_final: bool,
        opens_answer: bool = True,
    ) -> str:
        """The prompt of a conversation, by the model's chat template. opens_answer: the prompt ends where an answer
        begins, unless the answer continues the last message."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise RequestError("this model has no chat template: use /v1/completions")
        fixed = {
            "add_generation_prompt": opens_answer and not continue_final,
            "continue_final_message": continue_final,
        }
        try:
            return await self.threads.run(lambda: self._render(messages, **{**kwargs, **fixed}))
        except RequestError:
            raise
        except Exception as error:  # a template may raise anything over messages that it does not support
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from None

    def _render(self, messages: list[dict[str, Any]], tools: Sequence[Any] | None = None, **variables: Any) -> str:
        found = {**self._args.chat_template_defaults, **variables, "tools": tools, "tokenize": False}
        return cast(str, self._tokenizer.apply_chat_template(messages, **found))

    # Answers

    async def receive_forever(self, receive: Callable[[], Any]) -> None:
        while True:
            message = decode_to_tokenizer(await receive())
            if isinstance(message, BatchStrOutput):
                now = time.perf_counter()
                for at, output in enumerate(message.outputs):
                    if at % _OUTPUTS_AT_ONCE == _OUTPUTS_AT_ONCE - 1:
                        await asyncio.sleep(0)  # other clients' turn
                    self._on_output(output, now)
            elif isinstance(message, BlockNaming):
                self._names = BlockKeys(message.secret, message.block_tokens) if message.block_tokens else None
            elif isinstance(message, RequestTimesOutput):
                now = time.perf_counter()
                for rid, times in message.times.items():
                    self._note_times(rid, times, now)
            elif isinstance(message, SchedulerReady):
                self._vocab_size = message.vocab_size or self._vocab_size
                self.context_length = message.context_len or self.context_length
                self.ready.set_result(message)
            else:
                self.control.answer(message)

    def _note_times(self, rid: str, times: ReqTimes, now: float) -> None:
        """The request's first token is there. Its text may come later, with that of others."""
        self.metrics.queued(times.queue_s)
        before = times.queue_s if self._queue_time_s is None else self._queue_time_s
        self._queue_time_s = before + _QUEUE_TIME_WEIGHT * (times.queue_s - before)
        if (state := self._states.get(rid)) is not None:
            state.times = times
            self._note_first_token(state, now)

    def _note_first_token(self, state: ReqState, now: float) -> None:
        if state.first is None:
            self._num_waiting -= not state.is_health_check
            state.first = now

    def _on_output(self, output: StrOutput, now: float) -> None:
        state = self._states.get(output.rid)
        if state is None or state.finished:
            # The request has ended. An abort may also cross the text whose stop string had ended it, if its reader is
            # slow.
            return
        reason = output.finish_reason
        num_tokens = len(output.output_ids) // 4
        if num_tokens:
            self.token_came.set()
        if reason is not None and reason.type == "abort" and not state.aborting:
            state.finished = True
            state.error = RequestError(reason.message or "the request was aborted", reason.status_code or 500)
            state.changed.set()
            self.metrics.aborted()
            return
        first = state.last is None and (num_tokens > 0 or (reason is not None and reason.type == "length"))
        # The time of the first token may have come before the token.
        known = state.first if state.last is None else state.last
        num_gaps = num_tokens - (state.last is None) if known is not None else 0
        self._note_first_token(state, now)
        assert state.first is not None
        if first:
            details = output.cached_tokens_details or {"device": output.cached_tokens}
            self.metrics.first_token(state.first - state.arrived, output.prompt_tokens, details)
        self.metrics.tokens(num_tokens, num_gaps, 0.0 if known is None else now - known)
        state.last, state.last_output = now, output
        if state.prompt is not None:
            state.answer.append(output.output_ids)
            if reason is not None:
                self._sample_answer(state.prompt, b"".join(state.answer))
        state.unread.append(output)
        state.unread_tokens += num_tokens
        if reason is not None:
            state.finished = True
            if reason.type == "abort":
                self.metrics.aborted()
            else:
                self.metrics.finished(now - state.arrived, output.completion_tokens, now - state.first)
            if isinstance(reason.matched, str):
                self._send(encode(AbortReq(rid=state.rid)))
        if state.finished or (state.stream and (first or state.unread_tokens >= self._args.stream_interval)):
            state.changed.set()

    # Control

    def abort(self, rid: str | None) -> None:
        """End the requests to which their clients gave this rid or this x-request-id; None ends all. They answer with
        the tokens that they have."""
        for state in self._states.values():
            names = (state.client_rid, state.request_id, state.rid)
            # An Engine's requests have an empty x-request-id, which names none of them.
            if (rid is None or (rid and rid in names)) and not state.finished:
                state.aborting = True
                if state.sent is not None:
                    self._send(encode(AbortReq(rid=state.rid)))

    async def get_internal_state(self) -> dict[str, Any]:
        state: dict[str, Any] = msgspec.json.decode(await self.control.state())
        self.metrics.set_scheduler_state(state)
        return state

    async def keep_history(self) -> None:
        """For ever: what the live page shows of the past."""

        async def state() -> dict[str, Any]:
            found: dict[str, Any] = msgspec.json.decode(await self.control.state(is_brief=True))
            return found

        await self.history.sample_forever(
            state, lambda: (self._num_begun, self._num_active, self.control.num_changes)
        )

    async def render_metrics(self) -> bytes:
        """With the scheduler's last known state, if it is too busy to answer."""
        try:
            await asyncio.wait_for(self.get_internal_state(), _METRICS_TIMEOUT_S)
        except (TimeoutError, RequestError):
            pass
        return self.metrics.render()

    # End

    @property
    def is_ready(self) -> bool:
        """Whether load balancers should send requests."""
        return self._refusal is None and not self._is_leaving

    @property
    def is_active(self) -> bool:
        return self._num_active > 0

    def announce_end(self) -> None:
        """Tell load balancers to send no more requests. What they send meanwhile is still taken."""
        self._is_leaving = True

    def refuse(self) -> None:
        """Refuse new requests. Running requests go on."""
        if self._refusal is None:
            self._refusal = RequestError("the server is shutting down", 503)

    async def flush_cache(self, timeout_s: float = 0.0) -> ControlReqOutput:
        """Empty the cache, once there is no request. timeout_s: how long to wait for that; then it is refused."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            if left > 0:
                # An event loop takes no time that is very long.
                await self.drained(min(left, _LONGEST_WAIT_S))
            if left <= 0 or not self.is_active:
                result = await self.control.flush_cache()
                if result.success or left <= 0:
                    return result
                # The scheduler has not ended an aborted request yet.
                await asyncio.sleep(min(left, _FLUSH_INTERVAL_S))

    async def drained(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
            return True
        except TimeoutError:
            return False

    def fail_all(self, message: str, status_code: int = 500) -> None:
        """End all waiting requests, now and from now on."""
        self._refusal = RequestError(message, status_code)
        for state in self._states.values():
            if not state.finished:
                state.error = self._refusal
                state.changed.set()
        self.control.fail_all(self._refusal)

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()
        self.threads.close()
