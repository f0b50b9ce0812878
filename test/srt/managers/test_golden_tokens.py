"""The gate on a trained model, SmolLM2-135M-Instruct. Its answers to real prompts are those of transformers, whatever
tier a prefix comes from. The perplexity of a page is the same with reuse as without.

`make test` runs a few short prompts through device, host, disk and a mix of them. The slow tests run thirty
through every tier and their mixes, and compare perplexities. `support/golden.py` has the tolerances.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.configs.model_files import resolve_model_path
from sglang.srt.configs.smollm2_model import SMOLLM2
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import serve_chat
from sglang.srt.managers.io_struct import (
    SchedulerReady,
    TokenizedGenerateReqInput,
    bytes_to_ids,
    decode_to_scheduler,
)
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.managers.scheduler_config import LayerStreamConfig
from sglang.srt.managers.startup.storage import DEFAULT_BLOCK_TOKENS
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.observability.metrics_collector import MetricsCollector
from sglang.srt.sampling.logprob_types import LogprobSpec
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers_utils import get_tokenizer
from support.all_tiers import Lender
from support.codec_cases import kv_block
from support.golden import (
    MARGIN,
    TOLERANCE,
    GateError,
    GoldenAnswer,
    GoldenPage,
    check_answer,
    check_logprobs,
    greedy_answer,
    page_logprobs,
    perplexity,
    read_golden,
    reference_model,
)
from support.local_engine import Generation
from support.real_engine import BLOCK, GREEDY, RealEngine, RealModel, Storage, real_model, skip_unless_fetched

# The prompts of the short gate: a conversation of two turns, text without a template, and short ones.
FEW = ("tea-on", "panama_canal-turn-1", "panama_canal-turn-2", "short-0", "chat")
# All prompts, with what they are answered.
ALL_TOKENS = 6400
BATCH = 6
# Of perplexities of one text: their quotient is no further from 1.
PERPLEXITY_TOLERANCE = 1e-4
# Tier -> those that are emptied before it serves. What leaves the device goes to a peer, if there is one.
EVICTED: dict[str, tuple[Tier, ...]] = {
    "device": (),
    "host": (Tier.DEVICE, Tier.PEER),
    "peer": (Tier.DEVICE,),
    "disk": (Tier.DEVICE, Tier.PEER, Tier.HOST),
    "remote": (Tier.DEVICE, Tier.PEER, Tier.HOST),
}


@pytest.fixture(scope="module")
def real() -> RealModel:
    return real_model()


@pytest.fixture
def lender(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lender]:
    """Its parameter: whether it is strict, and copies for the engine."""
    lender = Lender(tmp_path / "lender", 64, strict=getattr(request, "param", False))
    yield lender
    lender.kill()


def disk(folder: Path, **config: object) -> Storage:
    return Storage("file", folder, {"path": str(folder / "disk"), "secret": "gate", **config})


def whole_blocks(golden: list[GoldenAnswer]) -> int:
    """Tokens in whole blocks of prompts, but for the last token, which is always computed."""
    return sum((len(each.prompt) - 1) // BLOCK * BLOCK for each in golden)


def in_batches(engine: RealEngine, golden: list[GoldenAnswer], where: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for start in range(0, len(golden), BATCH):
        found += engine.check(golden[start : start + BATCH], where)
    return found


def cut_in_three(engine: RealEngine) -> None:
    """Of what device and host hold, the device keeps the front half, and the host two thirds."""
    controller, tree = engine.scheduler.cache.controller, engine.scheduler.cache.tree
    for tier, share in ((Tier.DEVICE, 2), (Tier.HOST, 3)):
        controller.evict(tier, tree.resident_pages(tier) // share)
        engine.core.step(engine.clock(), engine.core.progress())
        engine.settle()


class Parting:
    """A prompt that begins with the first block of another one, and goes on as a third one ends. If pages of a prefix
    change places, a prompt that shares the whole prefix is still answered right, because a key has its position in
    itself. This one is not."""

    def __init__(
        self, engine: RealEngine, shared: GoldenAnswer, other: GoldenAnswer, block_tokens: int = BLOCK
    ) -> None:
        """Answered without the cache."""
        self._block_tokens = block_tokens
        self.prompt = np.concatenate([shared.ids[:block_tokens], other.ids[-12:]])
        self.wanted = self._answer(engine, "bypass")
        assert not sum(self.wanted.cached_tokens_details.values())

    def check(self, engine: RealEngine, where: str) -> None:
        """shared is on the device, where it has come from another tier."""
        found = self._answer(engine, "no_store")
        cached = found.cached_tokens_details
        assert sum(cached.values()) == self._block_tokens, (where, cached)
        title = f"a prompt that shares the first block, from {where}"
        assert found.tokens == self.wanted.tokens, title
        check_logprobs(logprobs_of(self.wanted), logprobs_of(found), title)

    def _answer(self, engine: RealEngine, cache: str) -> Generation:
        (answer,) = engine.generate([self.prompt], GREEDY, logprobs=LogprobSpec(), cache=cache)
        engine.settle()
        return answer


def logprobs_of(answer: Generation) -> list[float]:
    return [each.logprob for each in answer.logprobs if each.logprob is not None]


# -- in make test ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_few_prompts_from_device_host_disk_and_a_mix(real: RealModel, tmp_path: Path) -> None:
    few = real.named(*FEW)
    engine = RealEngine(real, 1024, 1024, disk(tmp_path), chunked_prefill_size=96)
    engine.check(few, "computed")
    parting = Parting(engine, few[1], few[4])
    found = engine.check(few, "device")
    assert found["device"] > whole_blocks(few) and not found["host"] + found["disk"]
    engine.evict(Tier.DEVICE)
    found = engine.check(few, "host")
    assert found["host"] > 300 and not found["disk"]
    parting.check(engine, "host")
    engine.close()

    engine = RealEngine(real, 1024, 1024, disk(tmp_path))
    assert engine.check(few, "disk")["disk"] >= 256
    parting.check(engine, "disk")
    cut_in_three(engine)
    found = engine.check(few[1:3], "mixed")
    assert all(found[tier] > 0 for tier in ("device", "host", "disk")), found
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("write_policy", ["write_through", "auto"])
def test_a_page_has_the_same_perplexity_with_reuse(real: RealModel, tmp_path: Path, write_policy: str) -> None:
    (page,) = (each for each in real.golden.pages if each.name == "tea")
    cut = GoldenPage(page.name, page.tokens[:161], page.logprobs[:160])
    engine = RealEngine(real, 512, 512, disk(tmp_path), page_size=1, write_policy=write_policy)
    check_perplexity(engine, cut, 129, "device", "host", "disk")
    engine.close()


def check_perplexity(engine: RealEngine, page: GoldenPage, start: int, *tiers: str) -> None:
    """The tokens before start come from each tier; those from start on have the perplexity of the page that is
    computed whole."""
    whole = engine.score(page.ids, 1)
    assert sum(whole.cached.values()) == 0
    check_logprobs(page.logprobs, whole.logprobs, f"{page.name} computed")
    wanted = whole.logprobs
    assert abs(perplexity(wanted) / perplexity(page.logprobs) - 1) < PERPLEXITY_TOLERANCE
    for tier in tiers:
        engine.evict(*EVICTED[tier])
        scored = engine.score(page.ids, start)
        assert scored.cached[tier] == start - 1 == sum(scored.cached.values()), (tier, scored.cached)
        check_logprobs(wanted[start - 1 :], scored.logprobs, f"{page.name} from {tier}")
        quotient = perplexity(scored.logprobs) / perplexity(wanted[start - 1 :])
        assert abs(quotient - 1) < PERPLEXITY_TOLERANCE, f"{page.name} from {tier}: {quotient}"
        if tier != "device":
            check_beginnings(engine, page, start, tier)


def check_beginnings(engine: RealEngine, page: GoldenPage, start: int, tier: str) -> None:
    """Prompts that end inside a prefix that has come from a tier: behind each of its first pages and each block. The
    whole prefix does not show whether its pages are in order (see `Parting`)."""
    size = engine.scheduler.config.page_size
    ends = [end for end in sorted({*range(size, 4 * size, size), *range(BLOCK, start, BLOCK)}) if end < start]
    for end in ends:
        scored = engine.score(page.ids[: end + 3], end + 1)
        assert sum(scored.cached.values()) == end, (end, tier, scored.cached)
        title = f"{page.name}, whose first {end} tokens are from {tier}"
        check_logprobs(page.logprobs[end : end + 2], scored.logprobs, title)


SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
TURN = re.compile(r"<\|im_start\|>(user|assistant)\n(.*?)<\|im_end\|>\n", re.DOTALL)


def test_the_server_gives_its_chats_the_golden_tokens() -> None:
    """From the messages of /v1/chat/completions to what the scheduler gets. A golden prompt keeps its messages as
    tokens alone."""
    skip_unless_fetched()
    tokenizer = get_tokenizer(resolve_model_path(SMOLLM2))
    num_chats = 0
    for golden in read_golden().answers:
        text = tokenizer.decode(golden.prompt)
        if not text.startswith("<|im_start|>"):
            continue
        num_chats += 1
        messages = [{"role": role, "content": content} for role, content in TURN.findall(text)]
        assert len(messages) == (3 if golden.name.endswith("turn-2") else 1)
        found = asyncio.run(chat_ids(tokenizer, messages))
        assert tokenizer.decode(found).startswith(SYSTEM + "<|im_start|>user\n")
        assert found == golden.prompt, golden.name
    assert num_chats == 21


async def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """The tokens of a conversation as the scheduler gets them."""
    sent: asyncio.Queue[object] = asyncio.Queue()
    manager = TokenizerManager(
        ServerArgs(model_path=SMOLLM2, random_seed=1),
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        context_length=2048,
        send=lambda data: sent.put_nowait(decode_to_scheduler(data)),
        metrics=MetricsCollector(SMOLLM2),
    )
    manager.ready.set_result(SchedulerReady(max_total_num_tokens=2048, max_req_input_len=2047))
    request = ChatCompletionRequest(model=SMOLLM2, messages=messages, max_tokens=1)
    reply = asyncio.create_task(anext(serve_chat(request, manager, SMOLLM2)))
    message = await sent.get()
    reply.cancel()
    await asyncio.gather(reply, return_exceptions=True)
    assert isinstance(message, TokenizedGenerateReqInput)
    return bytes_to_ids(message.input_ids).tolist()


# -- the golden file ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_golden_file_is_what_transformers_gives(real: RealModel) -> None:
    model = reference_model(real.config)
    assert len(real.golden.answers) >= 30 and len(real.golden.pages) == 6
    for golden in real.named("short-1", "chat", "tea-on", "panama_canal-turn-2", "honeybees-0"):
        again = greedy_answer(model, golden.prompt)
        assert again.tokens == golden.tokens
        check_logprobs(golden.logprobs, again.logprobs, golden.name)
    page = real.golden.pages[0]
    check_logprobs(page.logprobs, page_logprobs(model, page.tokens), page.name)


def test_tokens_may_differ_where_the_golden_logits_are_as_good_as_equal() -> None:
    from sglang.srt.sampling.logprob_types import TokenLogprob
    from support.local_engine import Generation

    golden = GoldenAnswer("name", [1], [5, 6, 7], [-0.5, -0.7, -0.1], [8, 9, 9], [1.0, MARGIN / 2, 2.0])

    def answer(tokens: list[int], first: float = -0.5) -> Generation:
        logprobs = [TokenLogprob(token, first if i == 0 else golden.logprobs[i]) for i, token in enumerate(tokens)]
        return Generation(tokens, "length", logprobs)

    check_answer(golden, answer([5, 6, 7]))
    check_answer(golden, answer([5, 9, 3], first=-0.5 - TOLERANCE / 2))
    wrong = [answer([8, 6, 7]), answer([5, 3, 7]), answer([5, 6, 9]), answer([5, 6])]
    for other in [*wrong, answer([5, 6, 7], first=-0.5 - 2 * TOLERANCE), answer([5, 6, 7], first=float("nan"))]:
        with pytest.raises(GateError):
            check_answer(golden, other)


# -- all prompts, all tiers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled(real: RealModel, tmp_path_factory: pytest.TempPathFactory) -> Storage:
    """A disk with all prompts, computed in one batch, in chunks."""
    storage = disk(tmp_path_factory.mktemp("filled"))
    engine = RealEngine(real, ALL_TOKENS, ALL_TOKENS, storage, chunked_prefill_size=160)
    found = engine.check(real.golden.answers, "computed")
    assert not found["host"] + found["disk"]
    engine.close()
    return storage


def half(real: RealModel, page_size: int) -> list[GoldenAnswer]:
    """Of the prompts, another half for each page size. Turns of a conversation stay together."""
    return [each for i, each in enumerate(real.golden.answers) if (i % 4 < 2) == (page_size == 1)]


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
def test_all_prompts_from_device_host_and_disk(real: RealModel, filled: Storage, page_size: int) -> None:
    """The disk is that of another engine, which has ended."""
    golden = real.golden.answers
    engine = RealEngine(real, ALL_TOKENS, ALL_TOKENS, filled, page_size=page_size)
    assert in_batches(engine, golden, "disk")["disk"] > 2500
    assert in_batches(engine, golden, "device")["device"] >= whole_blocks(golden)
    engine.evict(Tier.DEVICE)
    assert in_batches(engine, golden, "host")["host"] > 3000
    engine.forget()
    in_batches(engine, golden[::3], "disk again")
    cut_in_three(engine)
    found = in_batches(engine, golden[::3], "mixed")
    assert all(found[tier] > 0 for tier in ("device", "host", "disk")), found
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
def test_prompts_from_the_remote_tier_and_from_a_peer(
    real: RealModel, tmp_path: Path, lender: Lender, page_size: int
) -> None:
    golden, storage = half(real, page_size), Storage("remote", tmp_path, {})
    engine = RealEngine(
        real, ALL_TOKENS, ALL_TOKENS, storage, lender, 64, page_size=page_size, chunked_prefill_size=256
    )
    in_batches(engine, golden, "computed in batches")
    engine.forget()
    assert in_batches(engine, golden, "remote")["remote"] > 1500
    # The lender has room for a part of it.
    engine.evict(Tier.DEVICE)
    found = in_batches(engine, golden, "peer and host")
    assert found["peer"] > 500 and found["host"] > 500, found
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("lender", [True], indirect=True, ids=["strict"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_prompts_from_a_strict_peer(real: RealModel, lender: Lender, page_size: int) -> None:
    """The engine maps nothing of what it borrows. The lender copies each page, both ways."""
    golden = real.named(*FEW, "tea-0", "tea-1")
    engine = RealEngine(real, 1536, 1536, None, lender, 64, page_size=page_size)
    assert engine.borrowed is not None and all(engine.borrowed.pool.is_strict(place) for place in range(64))
    parting = Parting(engine, golden[1], golden[4])
    engine.check(golden, "computed")
    engine.evict(Tier.DEVICE)
    found = engine.check(golden, "a strict peer")
    assert found["peer"] > 900, found
    parting.check(engine, "a strict peer")
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "block_tokens", "num_pieces"),
    [("disk", DEFAULT_BLOCK_TOKENS, 2), ("remote", DEFAULT_BLOCK_TOKENS, 2), ("remote", 256, 8)],
)
def test_blocks_as_a_server_has_them_by_default_and_larger_ones(
    real: RealModel, tmp_path: Path, tier: str, block_tokens: int, num_pieces: int
) -> None:
    """A remote store cuts such a block into pieces."""
    config = real.config
    block = kv_block(block_tokens // 16, config.num_layers, 16, config.num_kv_heads, config.head_dim, "float32")
    assert block.num_pieces == num_pieces
    golden = real.named("tea-0", "tea-1", "chat", "panama_canal-turn-1", "panama_canal-turn-2", "bicycle-on")
    storage = disk(tmp_path) if tier == "disk" else Storage("remote", tmp_path, {})
    storage.config["block_tokens"] = block_tokens
    engine = RealEngine(real, 2048, 2048, storage)
    parting = Parting(engine, golden[0], golden[2], block_tokens)
    engine.check(golden, "computed")
    engine.forget()
    found = engine.check(golden, tier)
    assert found[tier] > 700, found
    parting.check(engine, tier)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
def test_long_prompts_are_streamed(real: RealModel, filled: Storage, page_size: int) -> None:
    """The device has room for less than the longer prompts. One is computed, the others come from disk."""
    golden = half(real, page_size)
    options: dict[str, Any] = {
        "page_size": page_size,
        "chunked_prefill_size": 96,
        "layer_stream": LayerStreamConfig(2, 64 // page_size),
        "new_token_ratio": 0.0,
    }
    long = [each for each in golden if len(each.prompt) > 400]
    # Chunks so small that the device keeps some of them behind what is streamed.
    engine = RealEngine(real, 320, 1024, **{**options, "chunked_prefill_size": 32})
    tails: list[int] = []
    engine.check(long[:1], "computed and streamed", partial(note_tails, tails))
    assert engine.counters["streamed_reqs"] == 1
    assert sum(tail >= 32 for tail in tails) >= 2, tails
    engine.close()
    engine = RealEngine(real, 384, ALL_TOKENS, filled, **options)
    in_batches(engine, golden, "disk and streamed")
    found = in_batches(engine, long, "host and streamed")
    assert engine.counters["streamed_reqs"] >= 2 * len(long) and engine.counters["streamed_tokens"] > 0
    assert found["host"] > 1000
    engine.close()


def note_tails(tails: list[int], decision: BatchDecision) -> None:
    """For each chunk that streams: the device's tokens between what is streamed and the chunk."""
    launch = decision.launch
    if launch is None:
        return
    chunks = [prefix for prefix in launch.streams if launch.lens[prefix.req] > 1]
    tails += [int(launch.starts[prefix.req]) - prefix.end for prefix in chunks]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "write_policy"), [(1, "write_through"), (16, "write_through"), (1, "auto"), (16, "auto")]
)
def test_all_tiers_at_once(
    real: RealModel, tmp_path: Path, lender: Lender, page_size: int, write_policy: str
) -> None:
    """Pools so small that each tier is needed; the prompts come twice, in another order."""
    config = {"file": {"path": str(tmp_path / "disk"), "limit_gb": 0.03, "segment_mb": 6}, "remote": {}}
    engine = RealEngine(
        real,
        512,
        768,
        Storage("file,remote", tmp_path, {"secret": "gate", **config}),
        lender,
        16,
        page_size=page_size,
        chunked_prefill_size=64,
        layer_stream=LayerStreamConfig(2, 64 // page_size),
        new_token_ratio=0.0,
        max_running_requests=4,
        write_policy=write_policy,
    )
    rng = random.Random(page_size)
    found: Counter[str] = Counter()
    for _ in range(2):
        golden = half(real, page_size)
        rng.shuffle(golden)
        found += in_batches(engine, golden, "all tiers")
    assert all(found[tier] > 0 for tier in ("device", "peer", "host", "disk", "remote")), found
    engine.close()


@pytest.mark.slow
def test_pages_have_the_same_perplexity_from_every_tier(real: RealModel, tmp_path: Path, lender: Lender) -> None:
    engine = RealEngine(real, 1024, 1024, disk(tmp_path), lender, 64, chunked_prefill_size=100)
    for page in real.golden.pages[2:]:
        check_perplexity(engine, page, 385, "device", "host", "peer", "disk")
    engine.close()
    engine = RealEngine(real, 1024, 1024, Storage("remote", tmp_path, {}))
    check_perplexity(engine, real.golden.pages[0], 385, "remote")
    engine.close()
    stream = LayerStreamConfig(2, 4)
    engine = RealEngine(real, 256, 1024, chunked_prefill_size=64, layer_stream=stream, new_token_ratio=0.0)
    check_perplexity(engine, real.golden.pages[1], 385, "host")
    assert engine.counters["streamed_reqs"] >= 2
    engine.close()


# -- planted bugs ------------------------------------------------------------------------------------------------


# page: (2, layers, 16, heads, dim)


def swap_k_and_v(page: torch.Tensor) -> torch.Tensor:
    return page.flip(0)


def shift_positions_by_one(page: torch.Tensor) -> torch.Tensor:
    """K as if each token stood one position later. To change the order of a page's tokens would be no bug: a key has
    its position in itself."""
    dim = page.shape[-1]
    angles = real_model().config.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos().repeat(2), angles.sin().repeat(2)
    first, second = page[0].chunk(2, dim=-1)
    page[0] = page[0] * cos + torch.cat((-second, first), dim=-1) * sin
    return page


def drop_the_last_token(page: torch.Tensor) -> torch.Tensor:
    page[:, :, -1] = 0
    return page


def take_a_layer_from_another(page: torch.Tensor) -> torch.Tensor:
    page[:, 20] = page[:, 19]
    return page


BUGS = (swap_k_and_v, shift_positions_by_one, drop_the_last_token, take_a_layer_from_another)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_one_wrong_page_is_noticed(real: RealModel, bug: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Of a prompt of 200 tokens one page of 16 is spoilt on the host, as a wrong copy would."""
    (golden,) = real.named("honeybees-on")
    engine = RealEngine(real, 512, 512)
    engine.check([golden], "computed")
    engine.evict(Tier.DEVICE)
    assert engine.host_pool is not None
    path = engine.scheduler.cache.tree.match("", golden.ids).path
    page = engine.host_pool.kv[[int(frame) for node in path for frame in node.frames[Tier.HOST]][6]]
    page.copy_(bug(page.clone()))
    with pytest.raises(GateError):
        engine.check([golden], "with a wrong page")
    engine.close()
