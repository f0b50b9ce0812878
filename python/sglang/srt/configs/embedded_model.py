"""The embedded model: a small Llama with its tokenizer, written from a seed at first use, without any download.

Owns one directory in the user's cache, in Hugging Face's format, and the recipe for what is in it. It has learnt
nothing: its weights are random, scaled so that greedy output is varied and depends on the whole context. It is
there so that every part of the engine can be run, tested and shown on any machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang.srt.utils.cache_folder import ensure_folder, own_temporary_folder, user_cache

SEED = 20
VOCAB_SIZE = 2048
HIDDEN_SIZE = 256
INTERMEDIATE_SIZE = 768
NUM_LAYERS = 4
NUM_HEADS = 8
NUM_KV_HEADS = 2
HEAD_DIM = 32
MAX_POSITION = 32768

BOS, END_OF_TEXT, IM_START, IM_END, PAD = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
)
SPECIAL_TOKENS = (BOS, END_OF_TEXT, IM_START, IM_END, PAD)

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['content'] is string %}{%- set text = message['content'] %}"
    "{%- else %}{%- set text = message['content'] | selectattr('type', 'equalto', 'text')"
    " | map(attribute='text') | join('') %}{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + text + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def ensure_embedded_model(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The directory of the embedded model, written first if it is not there: a fraction of a second, 17 MB.

    cache_dir: None takes $XDG_CACHE_HOME or ~/.cache, and the user's temporary folder if that cannot be written. The
    directory's name holds a hash of this file, so another version of the recipe gets another directory. Any number of
    processes may call this at once. Raises OSError.
    """
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    try:
        return _ensure_below(user_cache(cache_dir), recipe)
    except OSError:
        temporary = None if cache_dir else own_temporary_folder()
        if temporary is None:
            raise
    return _ensure_below(temporary, recipe)


def _ensure_below(folder: Path, recipe: str) -> Path:
    return ensure_folder(folder / "sglang-embedded" / recipe, _FILES, _write_model, "the embedded model")


def _write_model(path: Path) -> None:
    from safetensors.numpy import save_file

    tokenizer = _train_tokenizer()
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": IM_END,
            "pad_token": PAD,
            "model_max_length": MAX_POSITION,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        path / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": INTERMEDIATE_SIZE,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": NUM_HEADS,
            "num_key_value_heads": NUM_KV_HEADS,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": MAX_POSITION,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "use_cache": True,
            "bos_token_id": ids[BOS],
            "eos_token_id": ids[IM_END],
            "pad_token_id": ids[PAD],
        },
    )
    _write_json(
        path / "generation_config.json",
        {
            "bos_token_id": ids[BOS],
            "eos_token_id": [ids[IM_END], ids[END_OF_TEXT]],
            "pad_token_id": ids[PAD],
            "do_sample": False,
        },
    )
    save_file(_weights(_unspeakable_tokens(tokenizer, ids)), path / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


# ---- weights -------------------------------------------------------------------------------------------------


def _weights(unspeakable: list[int]) -> dict[str, Any]:
    """Checkpoint tensors, float32. unspeakable: token ids whose logit is always 0, far below the best ones.

    The scales are chosen, not learnt. Sharp attention (scores of standard deviation 2.5) lets single tokens of the
    context through, and its output weighs as much as the token's own embedding: so the next token depends on what
    stands where in the context, and greedy decoding does not fall into short loops. The head is not tied: a tied
    one would repeat the last token.
    """
    import numpy as np

    rng = np.random.Generator(np.random.PCG64(SEED))

    def matrix(rows: int, columns: int, gain: float) -> Any:
        # Outputs have `gain` times the root mean square of the input.
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / columns**0.5)

    q_size, kv_size = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    ones = np.ones(HIDDEN_SIZE, dtype=np.float32)
    tensors = {"model.embed_tokens.weight": rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE), dtype=np.float32)}
    for i in range(NUM_LAYERS):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": ones.copy(),
            f"{layer}.self_attn.q_proj.weight": matrix(q_size, HIDDEN_SIZE, 1.6),
            f"{layer}.self_attn.k_proj.weight": matrix(kv_size, HIDDEN_SIZE, 1.6),
            f"{layer}.self_attn.v_proj.weight": matrix(kv_size, HIDDEN_SIZE, 1.0),
            f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN_SIZE, q_size, 1.5),
            f"{layer}.post_attention_layernorm.weight": ones.copy(),
            f"{layer}.mlp.gate_proj.weight": matrix(INTERMEDIATE_SIZE, HIDDEN_SIZE, 1.0),
            f"{layer}.mlp.up_proj.weight": matrix(INTERMEDIATE_SIZE, HIDDEN_SIZE, 1.0),
            f"{layer}.mlp.down_proj.weight": matrix(HIDDEN_SIZE, INTERMEDIATE_SIZE, 1.5),
        }
    tensors["model.norm.weight"] = ones.copy()
    head = matrix(VOCAB_SIZE, HIDDEN_SIZE, 3.0)
    head[unspeakable] = 0.0
    tensors["lm_head.weight"] = head
    return tensors


def _unspeakable_tokens(tokenizer: Any, special_ids: dict[str, int]) -> list[int]:
    """Special tokens except the end of a turn, and tokens that are no complete UTF-8 by themselves: so the output
    is text, and ends now and then."""
    found = [token_id for token, token_id in special_ids.items() if token != IM_END]
    for token_id in range(tokenizer.get_vocab_size()):
        # The decoder replaces what is no UTF-8 by U+FFFD.
        if "\ufffd" in tokenizer.decode([token_id], skip_special_tokens=False):
            found.append(token_id)
    return sorted(found)


# ---- tokenizer -----------------------------------------------------------------------------------------------


def _train_tokenizer() -> Any:
    """A byte-level BPE of exactly `VOCAB_SIZE` tokens, trained on `_corpus`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the corpus has too few words"
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos_id)]
            ),
        ]
    )
    return tokenizer


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NOUNS = _words("""
account address afternoon agreement airport answer apple archive argument army article artist atmosphere attempt
autumn balance bakery basket battery beach bicycle bird blanket boat border bottle branch breakfast bridge
brother budget building business butter cabin camera candle captain carpet castle cathedral center century chair
chapter charge child choice church circle citizen city climate clock cloud coast coffee collection college color
column comment committee community company computer condition contract copper corner cotton council country
courage course cousin culture current customer daughter decision degree desert design detail device dialogue
dinner direction distance doctor document dollar door dream driver edge education effect effort election
electricity element employee energy engine engineer entrance environment error evening event evidence example
exercise expert explanation factory family farmer father feature festival field figure fire fisherman flower
forest fortune freedom friend fruit function furniture future galaxy garden gate glass government grain
grandmother group guest guitar habit hammer harbor harvest health heart history holiday horse hospital hotel
house hunger husband idea image industry information island journal journey judge kettle key kitchen knowledge
labor ladder lake lamp language lantern leader leaf legend lesson letter level library light limit line lion
machine magazine manager map market material meadow meaning measure medicine meeting member memory merchant
message method midnight mill mind minister minute mirror model moment money month morning mother mountain mouse
museum music nation nature neighbor network night number object ocean office officer opinion orange orchard
order origin owner page painting palace paper parent passage path patient pattern payment people pepper period
person philosopher picture pilot planet plate pocket poem point police policy population power practice
president pressure price principle prison problem process product profession professor program project promise
property purpose quality quarter queen question railway rain reason record region relation report request
research result river road roof room rule sailor sample school science season secret section sentence servant
service shadow shape shelf ship shoulder signal silence silver sister soldier solution song source space spring
square stage standard star station statue storm story stranger street strength student subject success sugar
summer surface system table teacher temple theater theory thought thunder ticket tool tower town tradition train
travel treasure treaty tree trouble truth uncle universe valley value vessel victory village violin visitor
voice wagon wall water weather wedding week wheel wheat whisper wife wind window winter witness wolf woman
wonder work writer year
""")

_VERBS = _words("""
accept allow announce appear approach arrange arrive ask avoid become begin believe belong borrow bring build
call carry change choose climb close collect compare complete consider contain continue count cover create cross
decide defend deliver depend describe destroy develop discover discuss divide draw enjoy enter examine exchange
expect explain explore express fall fill find finish follow forget gather give grow guess happen hear help hold
hope imagine improve include increase inspect introduce invite join keep know laugh learn leave lend listen look
lose maintain measure meet mention move notice observe obtain offer open paint permit plant play prepare present
prevent produce protect prove provide publish pull push reach read receive recognize recommend reduce refuse
remain remember remove repair repeat replace reply require rest return reveal search select send separate serve
settle share shine show sing sleep speak spend stand start stop study suggest support suppose teach tell think
throw touch translate understand use visit wait walk wander want warn wash watch wear welcome win wish worry
write
""")

_ADJECTIVES = _words("""
ancient angry bitter blue brave brief bright broad broken busy calm careful cheap clean clear clever cold common
complex content cool curious dangerous dark dear deep different difficult distant distinct dry early eastern
easy empty entire equal familiar famous far fast final firm foreign fresh friendly full general gentle golden
grand gray great green happy hard heavy hidden high hollow honest hot huge human hungry important independent
kind large late lazy light little local lonely long loud low lucky main modern narrow natural necessary new
noble northern old open ordinary patient perfect plain pleasant polite poor popular possible powerful precious
private proud public pure quick quiet rare ready real red regular rich round royal rough sacred sad safe second
serious sharp short silent simple single slow small smooth soft solid southern special square steady strange
strong sudden sweet tall thick thin tiny tired true useful usual various warm weak western white whole wide wild
wise wooden yellow young
""")

_ADVERBS = _words("""
again almost already always away carefully certainly clearly directly easily entirely exactly finally generally
gladly hardly immediately indeed later mostly nearly never now often once only perhaps probably quickly quietly
rather really seldom slowly sometimes soon still suddenly then therefore together too usually well
""")

_TEMPLATES = (
    "The {a} {n} will {v} the {m} {r}.",
    "When the {n} began to {v}, every {m} in the {a} {o} had to {w} as well.",
    'She asked: "Why did the {n} {v} {r}?" and nobody could {w} it.',
    "I don't think that a {a} {n} is {b}; it's the {m} which we {v} that counts.",
    "There are {i} {n}s and {j} {m}s in the {o}, more than we could {v} before.",
    "First {v} the {n}, then {w} the {m}; {r} it becomes {a}.",
    "He was {v}ing and {w}ing, as {a} as his {n}, without the {b} {m}.",
    "In {i}, our {n} {v}ed from the {o} to the {m}, because they'd been {a}.",
    "What is the {a} {n}? It is a {b} {m} that you can {v} or {w}.",
    "Please {v} this {n} for me, and tell them how to {w} the {m}.\n",
    "# {n}\n\n- {v} the {m}\n- {w} the {o}\n\n",
    "def {v}_{n}({m}, {o}=None):\n    if {o} is None:\n        return [{m}]\n    return self.{w}({m}, {i})\n\n",
    "for {n} in range({i}):\n    {m}[{n}] = {n} * {j} + 1  # {v} {o}\n",
    '{{"{n}": "{m}", "{o}": {i}, "{a}": true, "{b}": [{j}, 0]}}\n',
    "int {v}_{n}(const char *{m}) {{\n  return {w}({m}, {i}) == 0;\n}}\n",
    "https://www.example.com/{n}/{m}?{v}={i}&{w}={j}",
    "<|im_start|>user\nCould you {v} the {n}?",
    "You are a helpful assistant. Answer the question about the {n} in {i} words.",
)

_FOREIGN = """
Guten Morgen, wie geht es Ihnen? Das Haus steht zwischen dem Fluß und der großen Straße, und wir können es sehen.
Bonjour, où est la bibliothèque? Les élèves étudient déjà la leçon à l'école, mais le café est très près d'ici.
Buenos días, ¿cómo está usted? El niño pequeño quería más agua mañana por la mañana, señor.
Привет, как дела? Сегодня хорошая погода, и мы идём домой.
你好，世界。今天天气很好，我们一起去学校。 こんにちは、元気ですか。ありがとうございます。 안녕하세요 세계.
""".strip().splitlines()


def _corpus() -> Iterator[str]:
    """Text with every word of the lists above in many sentences, the same on every machine."""
    for i in range(6000):
        # Strides without common factors with the lists' lengths walk through all combinations.
        yield _TEMPLATES[i % len(_TEMPLATES)].format(
            n=_NOUNS[i % len(_NOUNS)],
            m=_NOUNS[(i * 7 + 3) % len(_NOUNS)],
            o=_NOUNS[(i * 31 + 11) % len(_NOUNS)],
            v=_VERBS[i % len(_VERBS)],
            w=_VERBS[(i * 11 + 5) % len(_VERBS)],
            a=_ADJECTIVES[i % len(_ADJECTIVES)],
            b=_ADJECTIVES[(i * 13 + 7) % len(_ADJECTIVES)],
            r=_ADVERBS[i % len(_ADVERBS)],
            i=(i * 37) % 2111,
            j=(i * 53) % 97,
        )
    for _ in range(20):
        yield from _FOREIGN
