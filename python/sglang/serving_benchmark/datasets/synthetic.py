"""Datasets that are made up: random prompts, shared prefixes, conversations, and questions about long documents.

Lengths and orders come from a generator of numbers with the run's seed. Tokens come from block keys (`workload`).
"""

from __future__ import annotations

from argparse import Namespace
from itertools import count

import numpy as np

from sglang.serving_benchmark.draws import lengths_in_range, lengths_with_mean, zipf_ranks
from sglang.serving_benchmark.vocabulary import Vocabulary
from sglang.serving_benchmark.workload import Message, Session, Turn, Workload, made_up

# Coefficients of variation: of questions, answers and documents as in the simulator's LooGLE, of chats as measured of
# none: even less than in ShareGPT, so that few sessions are enough.
_QUESTION_CV, _ANSWER_CV, _DOCUMENT_CV, _CHAT_CV = 0.4, 0.8, 0.35, 0.5


def random_prompts(args: Namespace, vocabulary: Vocabulary) -> Workload:
    """Prompts that share nothing."""
    rng = np.random.default_rng(args.seed)
    inputs = lengths_in_range(rng, args.num_prompts, args.random_input_len, args.random_range_ratio)
    outputs = lengths_in_range(rng, args.num_prompts, args.random_output_len, args.random_range_ratio)
    inputs = np.maximum(1, inputs - vocabulary.num_special_tokens)
    return Workload(
        tuple(
            Session((Turn(made_up(key, length), output),))
            for key, (length, output) in enumerate(zip(inputs.tolist(), outputs.tolist(), strict=True))
        )
    )


def shared_prefixes(args: Namespace, vocabulary: Vocabulary) -> Workload:
    """Groups of prompts; those of a group begin with the same system prompt."""
    rng = np.random.default_rng(args.seed)
    groups, n = args.gsp_num_groups, args.gsp_num_groups * args.gsp_prompts_per_group
    keys = count()
    systems = lengths_in_range(rng, groups, args.gsp_system_prompt_len, args.gsp_range_ratio).tolist()
    contexts = [made_up(next(keys), length) for length in systems]
    if args.gsp_group_distribution == "zipf":
        chosen = zipf_ranks(rng, n, groups, args.gsp_zipf_alpha)
    else:
        chosen = np.repeat(np.arange(groups), args.gsp_prompts_per_group)
    if not args.gsp_ordered:
        chosen = rng.permutation(chosen)
    sessions = []
    for group in chosen.tolist():
        questions = lengths_in_range(rng, args.gsp_num_turns, args.gsp_question_len, args.gsp_range_ratio).tolist()
        outputs = lengths_in_range(rng, args.gsp_num_turns, args.gsp_output_len, args.gsp_range_ratio).tolist()
        turns = tuple(Turn(made_up(next(keys), q), out) for q, out in zip(questions, outputs, strict=True))
        sessions.append(Session(turns, contexts[group]))
    return Workload(tuple(sessions))


def multi_turn(args: Namespace, vocabulary: Vocabulary) -> Workload:
    """Conversations with time to think between the turns. All begin with one system prompt."""
    rng = np.random.default_rng(args.seed)
    turns = min(args.multi_turn_num_turns, args.num_prompts)
    n = -(-args.num_prompts // turns)
    messages = lengths_with_mean(rng, n * turns, args.multi_turn_message_len, _CHAT_CV).reshape(n, turns).tolist()
    outputs = lengths_with_mean(rng, n * turns, args.multi_turn_output_len, _CHAT_CV).reshape(n, turns).tolist()
    delays = rng.exponential(args.multi_turn_think_time, (n, turns)) if args.multi_turn_think_time else None
    keys = count()
    system = made_up(next(keys), args.multi_turn_system_len) if args.multi_turn_system_len else None
    return Workload(
        tuple(
            Session(
                tuple(
                    Turn(
                        made_up(next(keys), messages[s][t]),
                        outputs[s][t],
                        float(delays[s, t]) if t and delays is not None else 0.0,
                    )
                    for t in range(turns)
                ),
                system,
            )
            for s in range(n)
        )
    )


def documents(args: Namespace, vocabulary: Vocabulary) -> Workload:
    """Several questions about each of a few long documents, as LooGLE has them. Orders: shuffle asks about all
    documents equally often; zipf about few of them most of the time."""
    rng = np.random.default_rng(args.seed)
    n, num_documents = args.num_prompts, args.loogle_num_documents
    lengths = lengths_with_mean(rng, num_documents, args.loogle_document_len, _DOCUMENT_CV).tolist()
    keys = count()
    texts: list[Message] = [made_up(next(keys), length) for length in lengths]
    questions = lengths_with_mean(rng, n, args.loogle_question_len, _QUESTION_CV).tolist()
    outputs = lengths_with_mean(rng, n, args.loogle_output_len, _ANSWER_CV).tolist()
    if args.loogle_order == "zipf":
        # Another number of requests draws others, not the same ones a little later.
        about = zipf_ranks(np.random.default_rng([args.seed, n]), n, num_documents, args.loogle_zipf_alpha)
    else:
        about = rng.permutation(np.arange(n) % num_documents)
    return Workload(
        tuple(
            Session((Turn(made_up(next(keys), question), output),), texts[document])
            for document, question, output in zip(about.tolist(), questions, outputs, strict=True)
        )
    )
