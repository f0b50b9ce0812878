"""Messages between the processes: msgspec structs, token ids as little-endian int32 bytes, no pickle.

    tokenizer manager --ToScheduler--> scheduler --ToDetokenizer--> detokenizer --ToTokenizer--> tokenizer manager

The scheduler answers control requests, and reports that it is ready, through the detokenizer, which passes on what is
not text. Every message is one tagged struct; `encode` and the three decoders below are the only codecs.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from sglang.srt.sampling.logprob_types import LogprobSpec, TokenLogprob
from sglang.srt.sampling.sampling_params import SamplingParams

PROMPT_TAIL_TOKENS = 5


def ids_to_bytes(ids: Any) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def bytes_to_ids(data: bytes) -> np.ndarray:
    """(num_tokens,) int32, a read-only view of data."""
    return np.frombuffer(data, dtype="<i4")


class Message(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    pass


class TokenizedGenerateReqInput(Message, frozen=True):
    """input_ids: int32 bytes. extra_key: namespace; requests with different keys share no cache. priority: of what it
    leaves in the cache, for --radix-eviction-policy priority. The sender sets sampling_params.sampling_seed, so that
    the scheduler draws nothing."""

    rid: str
    input_ids: bytes
    sampling_params: SamplingParams
    extra_key: str = ""
    priority: int = 0
    stream: bool = False
    logprobs: LogprobSpec | None = None


class DetokenizeReq(Message, frozen=True):
    """The scheduler tells the detokenizer of a request before its first tokens: `detokenize_req` makes it.
    prompt_tail: the prompt's last ids, for tokenizers that drop the space of a text's first word."""

    rid: str
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    prompt_tail: bytes = b""


def detokenize_req(req: TokenizedGenerateReqInput) -> DetokenizeReq:
    params = req.sampling_params
    return DetokenizeReq(
        rid=req.rid,
        stop=params.stop,
        skip_special_tokens=params.skip_special_tokens,
        no_stop_trim=params.no_stop_trim,
        prompt_tail=req.input_ids[-4 * PROMPT_TAIL_TOKENS :],
    )


class AbortReq(Message, frozen=True):
    """Ends a request wherever it is; unknown rids are ignored. The scheduler answers with a last BatchTokenIDOutput
    entry whose finish reason is `abort`, unless the request had already finished."""

    rid: str


class FlushCacheReqInput(Message, frozen=True):
    id: str


class AttachHiCacheStorageReqInput(Message, frozen=True):
    """As the flags of the same names say; extra_config: JSON."""

    id: str
    backend: str
    extra_config: str = ""
    prefetch_policy: str = "timeout"
    write_policy: str = "write_through"


class DetachHiCacheStorageReqInput(Message, frozen=True):
    id: str


class ClearHiCacheReqInput(Message, frozen=True):
    """Forget everything that the storage backend has of this model."""

    id: str


class GetInternalStateReq(Message, frozen=True):
    id: str


class ControlReqOutput(Message, frozen=True):
    """The answer to a flush, or to a request about storage."""

    id: str
    success: bool
    message: str = ""


class GetInternalStateReqOutput(Message, frozen=True):
    """state: the JSON of `GET /hicache/state`."""

    id: str
    state: bytes


class SchedulerReady(Message, frozen=True):
    """Sent once, when the first request may come. max_req_input_len: longest prompt that can ever be served."""

    max_total_num_tokens: int
    max_req_input_len: int
    info: dict[str, Any] = {}


class FinishReason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """type: stop, length or abort. matched: the token id or string that ended it. message, status_code: aborts."""

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request since its last output. cached_tokens_details: tier -> prompt tokens found there.
    logprobs: one per new token, if asked for; prompt_logprobs: in the first output, for the prompt's."""

    rid: str
    output_ids: bytes
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_tokens_details: dict[str, int] = {}
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []


class BatchTokenIDOutput(Message, frozen=True):
    outputs: list[TokenOutput]


class StrOutput(TokenOutput, frozen=True, kw_only=True):
    """text: new text only. A request that ended by a stop string ends here, whatever the scheduler still sends."""

    text: str


class BatchStrOutput(Message, frozen=True):
    outputs: list[StrOutput]


StorageReqInput = AttachHiCacheStorageReqInput | DetachHiCacheStorageReqInput | ClearHiCacheReqInput
ToScheduler = TokenizedGenerateReqInput | AbortReq | FlushCacheReqInput | StorageReqInput | GetInternalStateReq
Control = ControlReqOutput | GetInternalStateReqOutput | SchedulerReady
ToDetokenizer = DetokenizeReq | BatchTokenIDOutput | Control
ToTokenizer = BatchStrOutput | Control

encode = msgspec.msgpack.Encoder().encode
decode_to_scheduler = msgspec.msgpack.Decoder(ToScheduler).decode
decode_to_detokenizer = msgspec.msgpack.Decoder(ToDetokenizer).decode
decode_to_tokenizer = msgspec.msgpack.Decoder(ToTokenizer).decode
