"""From a JSON body to checked values: decoding, fields that are refused, sampling parameters.

A field that upstream has and this engine lacks is refused by name if its value asks for something. A value that
changes nothing is accepted. An unknown field is ignored, as OpenAI and upstream do, or refused with --strict-fields.
A warning names an unknown field that looks like a known one, or that vLLM serves.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from sglang.srt.mem_cache.namespaces import namespace_of
from sglang.srt.sampling.sampling_params import GrammarSpec, SamplingParams
from sglang.srt.utils.errors import RequestError

T = TypeVar("T")

# Field -> the values, beside null, that change nothing.
_UNSUPPORTED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "watermark": (),
    "stop_regex": ([], ""),
    "custom_params": ({},),
}
UNSUPPORTED_NATIVE_SAMPLING = {
    **_UNSUPPORTED_SAMPLING,
    "beam_width": (0, 1),
    # The default. Upstream's bench_one_batch_server sends it; --stream-interval counts nevertheless.
    "stream_interval": (1,),
}
_UNSUPPORTED_ROUTING: dict[str, tuple[Any, ...]] = {
    "lora_path": (),
    "session_params": (),
    "custom_logit_processor": (),
    "images_config": ({},),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    # This engine is rank 0. sglang-router sends it with --dp-aware.
    "routed_dp_rank": (0,),
    "disagg_prefill_dp_rank": (),
    "data_parallel_rank": (0,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "return_sampling_mask": (False,),
    "sampling_logprobs_mode": (),
    "mm_processor_kwargs": ({},),
}
_UNSUPPORTED_OPENAI: dict[str, tuple[Any, ...]] = {
    # Upstream has it as a response_format.
    "structural_tag": (),
    **_UNSUPPORTED_SAMPLING,
    **_UNSUPPORTED_ROUTING,
    "return_spec_tokens_details": (False,),
    "return_token_ids": (False,),
}
UNSUPPORTED_CHAT = {
    **_UNSUPPORTED_OPENAI,
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "return_prompt_token_ids": (False,),
    "return_meta_info": (False,),
    "return_input_ids_in_sglext": (False,),
    "return_output_ids_in_sglext": (False,),
    "return_flat_raw_output_top_logprobs": (False,),
    "return_flat_raw_top_logprobs_b64": (False,),
    "task": (),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "use_audio_in_video": (False,),
    "video_config": ({},),
    "input_ids": (),
}
UNSUPPORTED_COMPLETION = {
    **_UNSUPPORTED_OPENAI,
    "suffix": ("",),
    "custom_labels": ({},),
}
UNSUPPORTED_EMBEDDING: dict[str, tuple[Any, ...]] = {
    "lora_path": (),
    "embed_override_token_id": (),
    "embed_overrides": (),
}
UNSUPPORTED_GENERATE = {
    **_UNSUPPORTED_ROUTING,
    "watermark": (),
    "return_flat_raw_output_top_logprobs": (False,),
    "input_embeds": (),
    "image_data": (),
    "video_data": (),
    "audio_data": (),
    "modalities": (),
    "use_audio_in_video": (False,),
    "video_config": ({},),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "image_max_dynamic_patch": (),
    "video_max_dynamic_patch": (),
    "multi_item_delimiter_indices": (),
    "token_indices_to_pool": (),
    "return_flat_raw_top_logprobs": (False,),
    "return_flat_raw_top_logprobs_b64": (False,),
    "return_indexer_topk": (False,),
    "lora_id": (),
    "require_reasoning": (False,),
    "max_thinking_tokens": (),
    "background": (False,),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "return_prompt_token_ids": (False,),
    "positional_embed_overrides": (),
    "bootstrap_pair_key": (),
    "decode_tp_size": (),
    "kv_hints": (),
    "custom_labels": ({},),
}

# Fields of upstream's and vLLM's that change nothing here. They are about logs, tracing and processes of theirs, or
# only add to a field that is refused.
NOTHING_TO_DO = frozenset(
    {
        *("received_time", "http_worker_ipc", "external_trace_header", "log_metrics", "no_logs", "routing_key"),
        *("conversation_id", "need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls", "mm_hashes"),
        *("mm_content_hashes", "parallel_tool_calls", "separate_reasoning", "stream_reasoning", "bootstrap_pair_key"),
        *("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"),
        *("ebnf_full_assistant", "abort_message", "betas", "spaces_between_special_tokens"),
        *("guided_decoding_backend", "return_token_strs"),
    }
)

# Fields of vLLM's that change an answer there and are ignored here -> the values, beside null, that change nothing.
# Of chats, add_special_tokens is false there by default, elsewhere true.
IGNORED_VLLM: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,),
    "add_special_tokens": (),
    "documents": ([],),
    "chat_template": (),
    "include_reasoning": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "guided_whitespace_pattern": (),
    "thinking_token_budget": (),
    "logits_processors": ([],),
    "detokenize": (True,),
    "echo": (False,),
}

MAX_N = 128  # OpenAI's
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 1024
MAX_NAME_LENGTH = 1024
CACHE_MODES = ("bypass", "no_store")
MAX_STOP_TOKEN_IDS = 1024
# Names of the fields that restrict an answer, which are kinds of `GrammarSpec`.
GRAMMAR_KINDS = ("json_schema", "regex", "ebnf", "structural_tag")
# The most answers of one request over HTTP, over all its prompts.
MAX_ANSWERS = 2048
# The most unknown fields of one request that are compared with known ones, and that are named.
MAX_COMPARED = 32
MAX_WARNINGS = 8
# The most characters of a field's name that are compared and shown.
_MAX_FIELD_NAME = 64
# The likeness of two names (difflib's ratio) from which one is taken for a misspelling of the other.
_ALIKE = 0.85
_INT64 = range(-(1 << 63), 1 << 63)
_HALF_A_PAIR = re.compile(rb"\\ud[89ab]..(?!\\ud[c-f])|(?<!\\ud[89ab]..)\\ud[c-f]", re.IGNORECASE)
_FIELD_IN_MESSAGE = re.compile(r"`\$\.([A-Za-z_]+)")


def decode_body(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("the body is not valid JSON: it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {_why_no_json(body, error)}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


def _why_no_json(text: bytes, error: Exception) -> str:
    """msgspec takes some halves of surrogate pairs for a text that is cut off."""
    return "it has half of a surrogate pair, which is no character" if _HALF_A_PAIR.search(text) else str(error)


def convert(body: Mapping[str, Any], kind: type[T], unsupported: Mapping[str, Sequence[Any]]) -> T:
    """The body as a struct. Raises RequestError that names the field."""
    refuse_unsupported(body, unsupported)
    try:
        return msgspec.convert(body, kind, str_keys=True)
    except msgspec.ValidationError as error:
        found = _FIELD_IN_MESSAGE.search(str(error))
        message = str(error).replace("`$.", "`").replace(" | null`", "`")
        raise RequestError(message, param=found.group(1) if found else None) from None


def refuse_unsupported(body: Mapping[str, Any], unsupported: Mapping[str, Sequence[Any]]) -> None:
    for name, harmless in unsupported.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise RequestError(f"{name} is not supported by this engine yet: leave it out", param=name)


def check_fields(
    body: Mapping[str, Any], kind: type[msgspec.Struct], unsupported: Mapping[str, Sequence[Any]], strict: bool
) -> list[str]:
    """A warning for each unknown field that looks like a known one, belongs in sampling_params, or changes an answer
    of vLLM's, in printable ASCII. strict: raise RequestError for any unknown field."""

    def likely_field(name: str, known: tuple[str, ...]) -> str:
        if "sampling_params" in kind.__struct_fields__ and name in SamplingFields.__struct_fields__:
            return ": it belongs in sampling_params"
        if name in IGNORED_VLLM:
            return ": vLLM serves it, and this engine does not"
        return did_you_mean(name, known)

    unknown = _unknown_fields(body, kind, unsupported)
    if strict:
        for name, known in unknown:
            raise RequestError(
                f"this server knows no field {shown(name)}{likely_field(name, known)}", 400, name[:_MAX_FIELD_NAME]
            )
    looked_at = itertools.islice(unknown, MAX_COMPARED)
    found = ((name, likely_field(name, known)) for name, known in looked_at)
    warnings = (f"the field {shown(name)} is not known and was ignored{likely}" for name, likely in found if likely)
    return list(itertools.islice(warnings, MAX_WARNINGS))


def _unknown_fields(
    body: Mapping[str, Any], kind: type[msgspec.Struct], unsupported: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each unknown field of the body, or of a table in it, with the names that are known in its place."""
    fields = kind.__struct_fields__

    def asks_of_vllm(name: str) -> bool:
        default = ("messages" not in fields,) if name == "add_special_tokens" else ()
        return body[name] is not None and body[name] not in (*IGNORED_VLLM[name], *default)

    for name in body:
        if name in fields or name in unsupported or name in NOTHING_TO_DO:
            continue
        if name not in IGNORED_VLLM or asks_of_vllm(name):
            yield name, (*fields, *unsupported)
    options = body.get("stream_options")
    if "stream_options" in fields and isinstance(options, dict):
        for name in options:
            if name not in StreamOptions.__struct_fields__:
                yield f"stream_options.{name}", tuple(f"stream_options.{f}" for f in StreamOptions.__struct_fields__)


def did_you_mean(name: str, known: tuple[str, ...]) -> str:
    """The end of a sentence about an unknown field; empty if it resembles no known field."""
    # This function is not cached: a cache would keep names of megabytes.
    return _did_you_mean(name, known) if len(name) <= _MAX_FIELD_NAME else ""


@functools.lru_cache(4096)
def _did_you_mean(name: str, known: tuple[str, ...]) -> str:
    plain = {_plain(each): each for each in known}
    wanted = _plain(name)

    def likeness(each: str) -> tuple[float, bool]:
        """Of two names that are equally alike, prefer the one with the same first letter: stopp is stop and not
        top_p."""
        return difflib.SequenceMatcher(None, each, wanted).ratio(), each[:1] == wanted[:1]

    near = max(difflib.get_close_matches(wanted, plain, 3, _ALIKE), key=likeness, default=None)
    return f": did you mean {plain[near]!r}?" if near is not None else ""


def _plain(name: str) -> str:
    """A name as it is compared: maxTokens and max-tokens become max_tokens."""
    return re.sub("[^a-z0-9.]", "", name.lower())


def shown(name: str) -> str:
    """A name from a client, for a message or a header: quoted, printable ASCII, shortened."""
    return repr(re.sub("[^ -~]", "?", name[:_MAX_FIELD_NAME]))


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """A client's sampling fields, unchecked, under /generate's names. None means the default."""

    n: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    # Fast tokenizers put no spaces there, whatever its value.
    spaces_between_special_tokens: bool | None = None
    sampling_seed: int | None = None
    # At most one.
    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


def sampling_params(
    fields: SamplingFields, names: Mapping[str, str] = {}, least_new_tokens: int = 0
) -> SamplingParams:
    """names: the client's names of parameters, where they differ. least_new_tokens: 0 where a prompt alone is of use,
    for its log-probabilities. Raises RequestError with the allowed range."""

    def require(ok: bool, name: str, value: Any, rule: str) -> None:
        if not ok:
            name = names.get(name, name)
            raise RequestError(f"{name} is {value!r}, but it must be {rule}", param=name)

    given = {name: value for name, value in msgspec.structs.asdict(fields).items() if value is not None}
    n = given.pop("n", 1)
    given.pop("spaces_between_special_tokens", None)
    stops = given.pop("stop", ())
    given["stop"] = stops = (stops,) if isinstance(stops, str) else tuple(stops)
    given["stop_token_ids"] = tuple(given.get("stop_token_ids", ()))
    grammar = _grammar({kind: given.pop(kind) for kind in GRAMMAR_KINDS if kind in given})
    params = SamplingParams(**given, grammar=grammar)

    require(1 <= n <= MAX_N, "n", n, f"from 1 to {MAX_N}")
    longest = fields.max_new_tokens
    require(
        params.max_new_tokens >= least_new_tokens,
        "max_new_tokens",
        params.max_new_tokens,
        f"at least {least_new_tokens}",
    )
    require(
        params.min_new_tokens >= 0 and (longest is None or params.min_new_tokens <= longest),
        "min_new_tokens",
        params.min_new_tokens,
        "at least 0 and at most " + names.get("max_new_tokens", "max_new_tokens"),
    )
    require(
        not (params.min_new_tokens and grammar is not None),
        "min_new_tokens",
        params.min_new_tokens,
        "left out where there is a grammar, which tells where an answer may end",
    )
    temperature = params.temperature
    require(math.isfinite(temperature) and temperature >= 0, "temperature", temperature, "a finite number from 0")
    require(0 < params.top_p <= 1, "top_p", params.top_p, "above 0 and at most 1")
    require(
        params.top_k == -1 or 1 <= params.top_k <= 1 << 31,
        "top_k",
        params.top_k,
        "from 1 to 2147483648, or -1 for the whole vocabulary",
    )
    require(0 <= params.min_p <= 1, "min_p", params.min_p, "from 0 to 1")
    require(-2 <= params.frequency_penalty <= 2, "frequency_penalty", params.frequency_penalty, "from -2 to 2")
    require(-2 <= params.presence_penalty <= 2, "presence_penalty", params.presence_penalty, "from -2 to 2")
    require(
        1e-3 <= params.repetition_penalty <= 2,
        "repetition_penalty",
        params.repetition_penalty,
        "above 0 (at least 0.001) and at most 2",
    )
    biases = params.logit_bias
    require(
        len(biases) <= MAX_LOGIT_BIAS, "logit_bias", f"a table of {len(biases)}", f"at most {MAX_LOGIT_BIAS} tokens"
    )
    for token, bias in biases.items():
        require(-100 <= bias <= 100, "logit_bias", {token: bias}, "from -100 to 100 for each token")
    require(len(stops) <= MAX_STOP_STRINGS, "stop", f"a list of {len(stops)}", f"at most {MAX_STOP_STRINGS} strings")
    for each in stops:
        require(1 <= len(each) <= MAX_STOP_LENGTH, "stop", each[:40], f"strings of 1 to {MAX_STOP_LENGTH} characters")
    num_ids = len(params.stop_token_ids)
    require(
        num_ids <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"a list of {num_ids}", f"at most {MAX_STOP_TOKEN_IDS} ids"
    )
    seed = params.sampling_seed
    require(seed is None or seed in _INT64, "sampling_seed", seed, "a whole number of 64 bits")
    # Division of logits by a smaller value would overflow.
    return msgspec.structs.replace(params, temperature=0.0 if temperature < 1e-6 else temperature)


def _grammar(given: Mapping[str, Any]) -> GrammarSpec | None:
    """given: kind -> a text, or a schema or tag as an object."""
    if not given:
        return None
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} exclude each other: give one of them", param=next(iter(given)))
    ((kind, source),) = given.items()
    if not isinstance(source, str):
        source = as_json(source, kind)
    elif kind in ("json_schema", "structural_tag"):
        try:
            msgspec.json.decode(source)
        except (msgspec.DecodeError, RecursionError) as error:
            why = _why_no_json(source.encode(errors="surrogatepass"), error)
            raise RequestError(f"{kind} is not valid JSON: {why}", param=kind) from None
    return GrammarSpec(kind, source)


def as_json(value: Any, name: str) -> str:
    """Raises RequestError that names the field."""
    try:
        return msgspec.json.encode(value).decode()
    except (RecursionError, UnicodeError) as error:
        raise RequestError(f"{name} is not usable: {error}", param=name) from None


def check_num_answers(number: int, limit: int = MAX_ANSWERS) -> None:
    """Each answer costs time and memory in this process before the scheduler receives it."""
    if number > limit:
        raise RequestError(
            f"this asks for {number} answers, but one request may ask for {limit}: split it into several requests"
        )


def check_prompts(body: Mapping[str, Any], names: Sequence[str], check_length: Callable[[int], None]) -> None:
    """Refuse too many prompts, and a prompt of too many ids, before each prompt or id is looked at. names: the fields
    that hold prompts. check_length: raises RequestError for a prompt of so many tokens."""
    for name in names:
        prompts = body.get(name)
        if not isinstance(prompts, list) or not prompts:
            continue
        if isinstance(prompts[0], int):
            check_length(len(prompts))
            continue
        check_num_answers(len(prompts))
        for prompt in prompts:
            if isinstance(prompt, list):
                check_length(len(prompt))


def split_prompts(prompt: str | Sequence[Any], name: str) -> list[str | list[int]]:
    """A text, token ids, or a list of either, as a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if kinds == {str} or kinds == {list}:
        return list(prompt)
    raise RequestError(f"{name} must be a text, token ids, or a list of either, and not empty", param=name)


def check_name(value: str | None, name: str) -> str | None:
    """Check a name from a client. It is kept, and sent back with every piece of an answer."""
    if value is not None and len(value) > MAX_NAME_LENGTH:
        raise RequestError(f"{name} has {len(value)} characters, at most {MAX_NAME_LENGTH} are allowed", param=name)
    return value


def session_id(value: str | None) -> str:
    """The field `session_id`; "" if it is not given."""
    return check_name(value, "session_id") or ""


def cache_mode(value: str | None) -> str:
    """The field `cache`, see `TokenizedGenerateReqInput`; "" if it is not given."""
    if value and value not in CACHE_MODES:
        modes = " or ".join(CACHE_MODES)
        raise RequestError(f"cache is {value!r}, but it must be {modes}", param="cache")
    return value or ""


def namespace(cache_salt: str | None, extra_key: str | None) -> str:
    """The namespace that separates the cached prefixes of requests. No two pairs give the same string."""
    check_name(cache_salt, "cache_salt")
    check_name(extra_key, "extra_key")
    return namespace_of(cache_salt or "", extra_key or "")
