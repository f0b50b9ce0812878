"""Messages between the processes: msgspec structs, token ids as little-endian int32 bytes, no pickle.

    tokenizer manager --ToScheduler--> scheduler --ToDetokenizer--> detokenizer --ToTokenizer--> tokenizer manager

The scheduler's answers to control requests, and its report that it is ready, go through the detokenizer. It passes on
messages that are not text. Every message is one tagged struct; `encode` and the three decoders below are the only
codecs.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from sglang.srt.mem_cache.block_keys import KEY_BYTES, NO_KEYS, BlockKeys
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


class PromptKeys(msgspec.Struct, frozen=True):
    """The names of a prompt's blocks, made before the scheduler gets it; see `BlockKeys`."""

    # `BlockKeys.naming` of what made them.
    naming: bytes
    # 16 bytes per whole block of the prompt.
    keys: bytes

    @classmethod
    def make(cls, names: BlockKeys, namespace: str, ids: np.ndarray) -> PromptKeys:
        return cls(names.naming, names.of_prompt(namespace, ids).tobytes())

    def of_naming(self, names: BlockKeys) -> np.ndarray:
        """(n, 16) uint8; n = 0 if storage names blocks otherwise by now."""
        if self.naming != names.naming:
            return NO_KEYS
        return np.frombuffer(self.keys, np.uint8).reshape(-1, KEY_BYTES)


class TokenizedGenerateReqInput(Message, frozen=True):
    """A request, as the scheduler gets it."""

    rid: str
    # int32 bytes.
    input_ids: bytes
    # The sender sets sampling_seed, so that the scheduler draws no numbers.
    sampling_params: SamplingParams
    # The namespace. Requests with different namespaces share no cache.
    extra_key: str = ""
    # What the request does without: `no_store` leaves nothing in the cache, `bypass` does not read it either.
    cache: str = ""
    # Of the KV that the request leaves in the cache, for --radix-eviction-policy priority.
    priority: int = 0
    # The client's name for the requests that continue each other; a hint to the cache, see `SessionKeeper`.
    session_id: str = ""
    stream: bool = False
    logprobs: LogprobSpec | None = None
    # The answer is one token, and the hidden state behind it.
    is_embedding: bool = False
    # None: the scheduler makes them where it needs them.
    prompt_keys: PromptKeys | None = None
    # How long the grammar took to compile when it was checked; see `GrammarChecker`.
    grammar_lane: int = 0


class DetokenizeReq(Message, frozen=True):
    """Announces a request to the detokenizer before its first tokens; `detokenize_req` makes it."""

    rid: str
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    # The prompt's last ids (int32 bytes), for tokenizers that drop the space of a text's first word.
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
    """Ends a request wherever it is. Unknown rids are ignored. The scheduler answers with a last BatchTokenIDOutput
    entry whose finish reason is `abort`, unless the request had already finished."""

    rid: str


class FlushCacheReqInput(Message, frozen=True):
    id: str


class AttachHiCacheStorageReqInput(Message, frozen=True):
    """The fields have the meaning of the flags with the same names. extra_config: JSON."""

    id: str
    backend: str
    extra_config: str = ""
    prefetch_policy: str = "timeout"
    write_policy: str = "auto"


class DetachHiCacheStorageReqInput(Message, frozen=True):
    id: str


class ClearHiCacheReqInput(Message, frozen=True):
    """Forget all blocks of this model in the storage backend."""

    id: str


class SwitchTierReqInput(Message, frozen=True):
    """Turn a tier's reads or writes off (False) or on (True); None leaves them as they are."""

    id: str
    tier: str
    reads: bool | None = None
    writes: bool | None = None


class SetPoliciesReqInput(Message, frozen=True):
    """policies: names of `CachePolicies`' with their new values."""

    id: str
    policies: dict[str, Any]


class RetainPrefixReqInput(Message, frozen=True):
    """Keep a prompt in the cache for so many seconds from now, see `PrefixRetention`; 0: no longer."""

    id: str
    name: str
    seconds: float
    # The namespace, and int32 bytes.
    extra_key: str = ""
    input_ids: bytes = b""


class LabelPrefixReqInput(Message, frozen=True):
    """Name the beginning of a prompt, see `PrefixLabels`; without ids: drop the name."""

    id: str
    name: str
    # The namespace, and int32 bytes.
    extra_key: str = ""
    input_ids: bytes = b""


class EraseSaltReqInput(Message, frozen=True):
    """Drop all that requests with this cache_salt have left, on every tier."""

    id: str
    cache_salt: str
    # Whether requests with it are ended; else they are a reason to refuse.
    aborts_requests: bool = False


class SetQuotaReqInput(Message, frozen=True):
    """The most tokens that requests with this cache_salt may have cached, by tier; no limit for other tiers. None
    changes nothing."""

    id: str
    cache_salt: str
    tokens: dict[str, int] | None = None


AdminReqInput = (
    SwitchTierReqInput
    | SetPoliciesReqInput
    | RetainPrefixReqInput
    | LabelPrefixReqInput
    | EraseSaltReqInput
    | SetQuotaReqInput
)


class GetInternalStateReq(Message, frozen=True):
    id: str
    # Without lists of prefixes, which take milliseconds where there are many.
    is_brief: bool = False


class ControlReqOutput(Message, frozen=True):
    """The answer to a request of an administrator."""

    id: str
    success: bool
    message: str = ""
    # What was asked for, or done, in numbers.
    result: dict[str, Any] = {}


class GetInternalStateReqOutput(Message, frozen=True):
    """state: the JSON of `GET /hicache/state`."""

    id: str
    state: bytes


class SchedulerReady(Message, frozen=True):
    """Sent once, when the first request may come."""

    max_total_num_tokens: int
    # The longest prompt that can ever be served: with all the memory that peers may lend.
    max_req_input_len: int
    # The most tokens, prompt and answer, that there is room for without peers; 0: as many as with them.
    max_unlent_len: int = 0
    # The longest prompt without an answer; 0: max_req_input_len.
    max_unanswered_len: int = 0
    # Of the model, whose config may leave them to transformers' defaults; 0: not told.
    context_len: int = 0
    vocab_size: int = 0
    info: dict[str, Any] = {}


class BlockNaming(Message, frozen=True):
    """How storage names blocks from now on. block_tokens: 0 while no storage is attached."""

    secret: bytes = b""
    block_tokens: int = 0


class FinishReason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request ended."""

    # stop, length or abort.
    type: str
    # Of stop: the token id or string that ended the request.
    matched: int | str | None = None
    # Of length: the number of tokens.
    length: int | None = None
    # Of abort, with the status code for the client.
    message: str | None = None
    status_code: int | None = None


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request since its last output."""

    rid: str
    # int32 bytes.
    output_ids: bytes
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    # Tier -> prompt tokens that were found there.
    cached_tokens_details: dict[str, int] = {}
    # In the last output: why the other prompt tokens were computed, see `LostHits`.
    computed_tokens_details: dict[str, int] = {}
    # One per new token, if requested.
    logprobs: list[TokenLogprob] = []
    # The prompt's, in the first output, if requested.
    prompt_logprobs: list[TokenLogprob] = []
    # float32 bytes of a vector of length 1, in the last output, if requested.
    embedding: bytes = b""


class ReqTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a request went up to its first token, in seconds; see `RequestTimes`."""

    # From its arrival in the scheduler to its first launch, and the part of it that it waited for storage.
    queue_s: float
    storage_s: float
    # Tier -> time of the loads that brought its prefix from there, which overlap with launches and with each other.
    loads_s: dict[str, float]
    # What the launches of its prompt waited for loads, and what they took beside that.
    stall_s: float
    compute_s: float
    # From its first launch to its first token.
    prefill_s: float


class RequestTimesOutput(Message, frozen=True):
    """rid -> the times of a request; sent before its first token."""

    times: dict[str, ReqTimes]


class BatchTokenIDOutput(Message, frozen=True):
    outputs: list[TokenOutput]


class StrOutput(TokenOutput, frozen=True, kw_only=True):
    """text: new text only. A request that a stop string has ended ends with this output. Later tokens are ignored."""

    text: str


class BatchStrOutput(Message, frozen=True):
    outputs: list[StrOutput]


StorageReqInput = AttachHiCacheStorageReqInput | DetachHiCacheStorageReqInput | ClearHiCacheReqInput
ToScheduler = (
    TokenizedGenerateReqInput | AbortReq | FlushCacheReqInput | StorageReqInput | AdminReqInput | GetInternalStateReq
)
Control = ControlReqOutput | GetInternalStateReqOutput | SchedulerReady | BlockNaming | RequestTimesOutput
ToDetokenizer = DetokenizeReq | BatchTokenIDOutput | Control
ToTokenizer = BatchStrOutput | Control

encode = msgspec.msgpack.Encoder().encode
decode_to_scheduler = msgspec.msgpack.Decoder(ToScheduler).decode
decode_to_detokenizer = msgspec.msgpack.Decoder(ToDetokenizer).decode
decode_to_tokenizer = msgspec.msgpack.Decoder(ToTokenizer).decode
