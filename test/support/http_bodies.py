"""Bodies of HTTP requests for fuzzing, as hypothesis's strategies: upstream's and OpenAI's field names with valid,
odd and absurd values. chat_bodies.py has those of chats with tools, and of Anthropic's API.

`BODIES` has them by path. `as_json` turns what a strategy makes into what is sent.
"""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import strategies as st


def _names(text: str) -> list[str]:
    return text.split()


# Upstream's names, beside those that every case has.
SAMPLING = _names("""
    stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty
    repetition_penalty min_new_tokens n beam_width json_schema regex ebnf structural_tag ignore_eos
    skip_special_tokens spaces_between_special_tokens no_stop_trim stream_interval logit_bias sampling_seed
    custom_params stop_strs stop_regex_strs stop_str_max_len is_normalized max_new_tokens""")
ROUTING = _names("""
    session_id session_params lora_path custom_logit_processor bootstrap_host bootstrap_port bootstrap_room
    routed_dp_rank disagg_prefill_dp_rank data_parallel_rank priority extra_key cache_salt rid images_config
    return_hidden_states return_routed_experts routed_experts_start_len return_sampling_mask stream""")
GENERATE = _names("""
    text input_ids input_embeds image_data video_data audio_data return_logprob logprob_start_len
    top_logprobs_num token_ids_logprob sampling_logprobs_mode return_text_in_logprobs return_flat_raw_top_logprobs
    log_metrics return_indexer_topk modalities lora_id positional_embed_overrides decode_tp_size routing_key
    conversation_id background require_reasoning max_thinking_tokens no_logs custom_labels return_bytes return_entropy
    return_prompt_token_ids received_time kv_hints token_indices_to_pool multi_item_delimiter_indices""")
OPENAI = _names("""
    model frequency_penalty presence_penalty repetition_penalty logit_bias logprobs max_tokens n seed stop
    stop_token_ids stop_regex stream_options temperature top_p top_k min_p min_tokens user regex ebnf json_schema
    response_format ignore_eos skip_special_tokens no_stop_trim custom_params return_cached_tokens_details
    return_token_ids guided_json guided_regex guided_choice guided_grammar structured_outputs
    include_stop_str_in_output""")
COMPLETION = ["prompt", "best_of", "echo", "suffix", "custom_labels", *OPENAI, *ROUTING]
CHAT = _names("""
    messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls reasoning_effort reasoning
    thinking continue_final_message add_generation_prompt separate_reasoning stream_reasoning
    chat_template_kwargs task max_dynamic_patch input_ids return_meta_info use_audio_in_video video_config
    modalities functions""") + [*OPENAI, *ROUTING]
TOKENIZE = _names("""
    messages add_generation_prompt continue_final_message chat_template_kwargs reasoning_effort
    reasoning thinking tools tool_choice""")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
odd_texts = st.sampled_from(["", "\0", "a\0b", "\u202e", "\ufffd", "🎉" * 3, "<s>", "</s>", "{{ 1/0 }}", "x" * 3000])
numbers = st.sampled_from(
    [0, 1, -1, 2, 3, 0.5, 1.0, -0.5, 1e-9, 1e308, -1e308, 2047, 2048, -2048, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63)]
    + [2**64, 10**30, -(10**400), float("nan"), float("inf"), float("-inf"), True, False, "1", "NaN", None]
)
words = st.one_of(texts, odd_texts)
# JSON that is nested nearly as deeply as a decoder takes it; see `as_json`.
nests = st.builds("\1nest {} {}".format, st.sampled_from(["list", "object"]), st.sampled_from([50, 400, 960, 990]))
_NEST = re.compile(r'"\\u0001nest (list|object) (\d+)"')
ids = st.integers(0, 2047)
odd_ids = st.one_of(ids, ids, ids, numbers)
junk = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words, nests),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=5,
)


def of(*right: st.SearchStrategy) -> st.SearchStrategy:
    """Mostly a value that is right, or nearly."""
    return st.one_of(*right, *right, st.none(), numbers, junk)


def mostly(right: st.SearchStrategy, odds: int = 16) -> st.SearchStrategy:
    """Junk once in so many times. For values that lie deep, where much junk would hide what is behind the checks."""
    # one_of would drop repeated strategies.
    return st.sampled_from(range(odds)).flatmap(lambda i: junk if i == odds // 2 else right)


def as_json(value: Any) -> bytes:
    def nested(found: re.Match[str]) -> str:
        before, after = ("[", "]") if found[1] == "list" else ('{"a":', "}")
        return before * int(found[2]) + "1" + after * int(found[2])

    return _NEST.sub(nested, json.dumps(value)).encode()


probability = st.floats(0, 1)
penalty = st.floats(-2, 2)
id_lists = st.lists(ids, min_size=1, max_size=20)
tables = st.dictionaries(st.one_of(ids.map(str), words), st.one_of(penalty, numbers), max_size=3)
small = st.integers(-1, 4)
VALUES: dict[str, st.SearchStrategy] = {
    "temperature": of(probability),
    "top_p": of(probability),
    "min_p": of(probability),
    "top_k": of(st.integers(-1, 50)),
    "frequency_penalty": of(penalty),
    "presence_penalty": of(penalty),
    "repetition_penalty": of(st.floats(0.5, 2)),
    "logit_bias": of(tables),
    "stop": of(words, st.lists(words, max_size=4), st.just(["x"] * 3000)),
    "stop_token_ids": of(id_lists, st.lists(odd_ids, max_size=4), st.just([1] * 5000)),
    "n": of(st.integers(1, 3)),
    "best_of": of(st.integers(1, 3)),
    "min_tokens": of(small),
    "min_new_tokens": of(small),
    "max_tokens": of(small),
    "max_new_tokens": of(small),
    "max_completion_tokens": of(small),
    "seed": of(st.integers()),
    "sampling_seed": of(st.integers()),
    "logprobs": of(st.booleans(), st.integers(0, 5)),
    "top_logprobs": of(st.integers(0, 20)),
    "top_logprobs_num": of(small, st.lists(small, max_size=2)),
    "logprob_start_len": of(small),
    "return_logprob": of(st.booleans(), st.lists(st.booleans(), max_size=2)),
    "token_ids_logprob": of(id_lists, st.lists(odd_ids, max_size=3)),
    "stream_options": of(st.fixed_dictionaries({}, optional={"include_usage": junk, "continuous_usage_stats": junk})),
    "model": of(st.sampled_from(["embedded", "default", "", "gpt"])),
    "chat_template_kwargs": of(st.dictionaries(words, junk, max_size=2)),
    "guided_choice": of(st.lists(words, max_size=3)),
    "structured_outputs": of(
        st.fixed_dictionaries({}, optional={"choice": st.lists(words, max_size=3), "regex": words, "json": junk})
    ),
    "rid": of(words),
    "cache_salt": of(words),
    "extra_key": of(words),
}
BOOLEANS = _names("""
    ignore_eos skip_special_tokens no_stop_trim echo return_cached_tokens_details continue_final_message
    include_stop_str_in_output add_generation_prompt return_text_in_logprobs spaces_between_special_tokens""")
VALUES.update({name: of(st.booleans()) for name in BOOLEANS})
prompts = st.one_of(words, id_lists, st.lists(words, max_size=3), st.lists(id_lists, max_size=3), st.lists(odd_ids))
contents = st.one_of(
    words, words, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": words}), max_size=2)
)
roles = st.sampled_from(["user", "User", "assistant", "system", "tool", "nobody"])
messages = st.lists(st.fixed_dictionaries({"role": roles, "content": of(contents)}), min_size=1, max_size=3)


def fields(names: list[str]) -> st.SearchStrategy:
    """Up to four of the names, each with a value."""
    one = st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), VALUES.get(name, junk)))
    return st.lists(one, max_size=4).map(dict)


def body(base: dict[str, st.SearchStrategy], names: list[str]) -> st.SearchStrategy:
    return st.tuples(st.fixed_dictionaries(base), fields(names)).map(lambda parts: {**parts[0], **parts[1]})


stream = st.booleans()
tokens = st.integers(1, 3)
native = body({"max_new_tokens": tokens}, SAMPLING)
BODIES = {
    "/v1/completions": body({"prompt": prompts, "max_tokens": tokens, "stream": stream}, COMPLETION),
    "/v1/chat/completions": body({"messages": messages, "max_tokens": tokens, "stream": stream}, CHAT),
    "/generate": st.one_of(
        body({"text": of(words), "sampling_params": native, "stream": stream}, GENERATE + ROUTING),
        body({"input_ids": prompts, "sampling_params": native, "stream": stream}, GENERATE + ROUTING),
    ),
    "/tokenize": st.one_of(
        body({"prompt": prompts}, ["model", "add_special_tokens", "prompt", *TOKENIZE]),
        body({"messages": messages}, ["model", "add_special_tokens", *TOKENIZE]),
    ),
    "/detokenize": body({"tokens": prompts}, ["model", "skip_special_tokens", "tokens"]),
    "/abort_request": body({}, ["rid", "abort_all", "abort_message"]),
}
# Cheap ones need fewer; the middle three are what clients use.
SHARES = {"/tokenize": 4, "/detokenize": 4, "/abort_request": 6}
