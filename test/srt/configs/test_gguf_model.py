"""GGUF files as models: config, tokenizer, weights and logits, against transformers and the package `gguf`."""

from __future__ import annotations

import json
import os
import shutil

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from sglang.srt.configs import gguf_model
from sglang.srt.configs.gguf_model import GGUF_LINK, ensure_gguf_model, read_tensor_list
from sglang.srt.configs.gguf_tokenizer import GGUFTokenizer, UnknownTokenizerError
from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.configs.model_files import check_tokenizer_files, check_weight_files, resolve_model_path
from sglang.srt.layers.rotary_embedding import rope_frequencies
from sglang.srt.model_loader.gguf_weights import GGUFWeights
from sglang.srt.model_loader.loader import ModelLoadError
from support.gguf_files import add_field, finish, tokenizer_fields, write_gguf
from support.tiny_runner import TinyRunner

SIZES = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.2,
    bos_token_id=298,
    eos_token_id=299,
    pad_token_id=None,
)
FAMILIES = {
    "llama": lambda **more: LlamaConfig(**SIZES, **more),
    "mistral": lambda **more: MistralConfig(**SIZES, **{"sliding_window": None, **more}),
    "qwen2": lambda **more: Qwen2Config(**SIZES, **more),
    # The size of a head that transformers assumes, whatever the file has.
    "qwen3": lambda **more: Qwen3Config(**SIZES, head_dim=128, **more),
}
Kind = gguf.GGMLQuantizationType


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make(tmp_path, family="llama", name="model.gguf", kind=Kind.F32, fields=None, extra=None, **more):
    torch.manual_seed(5)
    config = FAMILIES[family](**more)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # norms and biases are constants at first
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    write_gguf(tmp_path / name, family, config, model.state_dict() | (extra or {}), kind, fields)
    return tmp_path / name, model


def logits_of(config, tokens):
    runner = TinyRunner(config)
    (sequence,) = runner.start([tokens.tolist()])
    return runner.forward([(sequence, len(tokens))], all_rows=True)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model_that_was_converted(tmp_path, family, tied):
    file, model = make(tmp_path, family, tie_word_embeddings=tied)
    config = ModelConfig.from_pretrained(str(file))
    assert config.dtype == torch.float32 and config.tie_word_embeddings == tied and config.eos_token_ids == (299,)
    ids = torch.randint(0, 298, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = model(ids).logits[0]
    torch.testing.assert_close(logits_of(config, ids[0]), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes make scales that are not finite
def test_every_type_that_the_package_dequantises_is_read_to_the_bit(tmp_path):
    file, _ = make(tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "llama")
    for field in gguf.GGUFReader(file).fields.values():
        if not field.name.startswith(("GGUF.", "general.")):
            add_field(writer, field.name, field.contents())
    rng = np.random.default_rng(3)
    kinds = [Kind.F16, Kind.F32, *gguf.quants._type_traits]
    assert len(kinds) > 20
    for kind in kinds:
        _, block_bytes = gguf.constants.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (6, block_bytes * 512 // gguf.constants.GGML_QUANT_SIZES[kind][0]), np.uint8)
        writer.add_tensor(f"of.{kind.name}", raw, raw_dtype=kind)
    writer.add_tensor("token_embd.weight", np.zeros((300, 64), np.float32))
    finish(writer)
    folder = ensure_gguf_model(tmp_path / "types.gguf")
    weights = GGUFWeights(folder)
    wanted = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(folder / GGUF_LINK).tensors
    }
    for kind in kinds:
        name = f"of.{kind.name}"
        assert weights.get_slice(name).get_shape() == [6, 512], name
        np.testing.assert_array_equal(weights.get_tensor(name).numpy(), wanted[name], err_msg=name)
        np.testing.assert_array_equal(
            weights.get_slice(name)[2:5, 7:19].numpy(), wanted[name][2:5, 7:19], err_msg=name
        )


def test_a_type_that_the_package_cannot_read_is_named(tmp_path):
    file, _ = make(tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "llama")
    for field in gguf.GGUFReader(file).fields.values():
        if not field.name.startswith(("GGUF.", "general.")):
            add_field(writer, field.name, field.contents())
    writer.add_tensor("token_embd.weight", np.zeros((300, 64), np.int32))
    finish(writer)
    with pytest.raises(ModelConfigError, match=r"token_embd.weight as I32, which the package gguf does not"):
        resolve_model_path(str(tmp_path / "odd.gguf"))


def test_the_parts_of_ranks_are_the_whole(tmp_path):
    file, model = make(tmp_path, "llama", kind=Kind.Q8_0)
    weights = GGUFWeights(ensure_gguf_model(file))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        whole, part = weights.get_tensor(name), weights.get_slice(name)
        half, columns = whole.shape[0] // 2, whole.shape[1] // 2
        torch.testing.assert_close(torch.cat((part[:half], part[half:])), whole, rtol=0, atol=0)
        both = torch.cat((part[:, :columns], part[:, columns:]), dim=1)
        torch.testing.assert_close(both, whole, rtol=0, atol=0)
        torch.testing.assert_close(whole, model.state_dict()[name], rtol=0, atol=0.02)


def test_a_directory_and_a_link_lead_to_the_same_model_and_a_new_file_to_a_new_one(tmp_path):
    file, _ = make(tmp_path)
    first = resolve_model_path(str(file))
    assert resolve_model_path(str(tmp_path)) == first
    (tmp_path / "link.gguf").symlink_to(file)
    assert resolve_model_path(str(tmp_path / "link.gguf")) == first
    assert resolve_model_path(str(first)) == first, "its own directory is a model, too"
    before = ModelConfig.from_pretrained(str(file)).fingerprint()
    (tmp_path / "copy").mkdir()
    copy = shutil.copy(file, tmp_path / "copy")
    assert ModelConfig.from_pretrained(copy).fingerprint() == before, "as on another machine"
    (tmp_path / "link.gguf").unlink()
    make(tmp_path, kind=Kind.F16)
    assert resolve_model_path(str(file)) != first
    assert ModelConfig.from_pretrained(str(file)).fingerprint() != before
    make(tmp_path, name="second.gguf")
    with pytest.raises(ModelConfigError, match=r"several GGUF files: give one itself \(model.gguf, second.gguf\)"):
        resolve_model_path(str(tmp_path))


def test_the_cache_keeps_the_models_used_last(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_model, "_MAX_MODELS", 2)
    file, _ = make(tmp_path)
    parent = tmp_path / "cache" / "sglang-gguf"
    for name in ("old", "older", "oldest"):
        (parent / name).mkdir(parents=True)
    for second, name in enumerate(("oldest", "older", "old")):
        os.utime(parent / name, (second, second))
    folder = ensure_gguf_model(file)
    assert sorted(path.name for path in parent.iterdir()) == [folder.name, "old"]
    os.utime(folder, (0, 0))  # it is in use, and stays
    ensure_gguf_model(file.rename(tmp_path / "renamed.gguf"))
    assert folder.is_dir() and len(list(parent.iterdir())) == 3


def test_the_load_format_has_to_fit(tmp_path):
    file, model = make(tmp_path)
    folder = resolve_model_path(str(file))
    for load_format in ("auto", "gguf"):
        check_weight_files(folder, load_format, "native")
    with pytest.raises(ModelConfigError, match="the weights are a GGUF file"):
        check_weight_files(folder, "safetensors", "native")
    with pytest.raises(ModelConfigError, match="--model-impl transformers does not read GGUF"):
        check_weight_files(folder, "auto", "transformers")
    model.save_pretrained(tmp_path / "hf")
    shutil.copy(file, tmp_path / "hf" / "model.gguf")
    assert resolve_model_path(str(tmp_path / "hf")) == tmp_path / "hf", "its safetensors are taken"
    check_weight_files(tmp_path / "hf", "auto", "native")
    with pytest.raises(ModelConfigError, match=r"is not a GGUF file; give the \.gguf file itself"):
        check_weight_files(tmp_path / "hf", "gguf", "native")


REFUSED = {
    "another architecture": ({"general.architecture": "gemma"}, "architecture 'gemma', which is not read from GGUF"),
    "a part": ({"split.count": 3}, "one part of several"),
    "experts": ({"llama.expert_count": 8}, "mixture of experts"),
    "no heads": ({"llama.attention.head_count": None}, "llama.attention.head_count is missing"),
    "heads that differ": ({"llama.attention.head_count_kv": [2, 4]}, "head_count_kv differs between layers"),
    "lengths that differ": ({"llama.attention.value_length": 8}, "keys and values differ in length"),
    "a base of 0": ({"llama.rope.freq_base": 0.0}, "rope.freq_base is 0.0, but has to be above 0"),
    "a base that is no number": ({"llama.rope.freq_base": "x"}, "rope.freq_base is 'x', but has to be above 0"),
    "parts that are no number": ({"split.count": "x"}, "its metadata does not fit together"),
    "an end that is no number": ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id is 'x'"),
    "unknown positions": ({"llama.rope.scaling.type": "spiral"}, "scales its positions by 'spiral'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_a_sentence(tmp_path, name):
    fields, sentence = REFUSED[name]
    arch = fields.get("general.architecture")
    file, _ = make(tmp_path, fields={} if arch else fields)
    if arch:
        file.write_bytes(file.read_bytes().replace(b"llama", arch.encode()))
    with pytest.raises(ModelConfigError, match=sentence):
        resolve_model_path(str(file))
    assert not list((tmp_path / "cache" / "sglang-gguf").glob("*")), "a refused file left something behind"


ODD_HEADS = [f"llama.{key}" for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")]


def test_a_sentence_about_the_model_names_the_users_file(tmp_path):
    file, _ = make(tmp_path, fields=dict.fromkeys(ODD_HEADS, 9))
    with pytest.raises(ModelConfigError, match=rf"^transformers cannot read the config of '{file}': "):
        ModelConfig.from_pretrained(str(file))
    make(tmp_path, fields={"llama.feed_forward_length": 95})
    with pytest.raises(ModelLoadError, match=rf"\(96, 64\), but the metadata of '{file}' asks for \(95, 64\)"):
        TinyRunner(ModelConfig.from_pretrained(str(file)))
    make(tmp_path, fields={"llama.block_count": 1})
    with pytest.raises(ModelLoadError, match=rf"^The weights in '{file}' do not fit"):
        TinyRunner(ModelConfig.from_pretrained(str(file)))


WITHOUT_TOKENIZER = {
    "unknown words": ({"tokenizer.ggml.pre": "martian"}, "by the rules of 'martian'.*--tokenizer-path"),
    "unknown kind": ({"tokenizer.ggml.model": "rwkv"}, "of the kind 'rwkv'.*--tokenizer-path"),
    "merges without a token": ({"tokenizer.ggml.merges": ["a zz"]}, "does not fit together.*--tokenizer-path"),
    "no scores": ({"tokenizer.ggml.model": "llama"}, "lacks the scores.*--tokenizer-path"),
}


@pytest.mark.parametrize("name", WITHOUT_TOKENIZER)
def test_without_a_tokenizer_another_one_serves(tmp_path, name):
    fields, sentence = WITHOUT_TOKENIZER[name]
    file, model = make(tmp_path, fields=fields)
    folder = resolve_model_path(str(file))
    with pytest.raises(ModelConfigError, match=sentence):
        check_tokenizer_files(folder)
    assert ModelConfig.from_pretrained(str(file)).vocab_size == model.config.vocab_size


def test_a_file_is_known_by_its_first_bytes_or_its_name(tmp_path):
    file, _ = make(tmp_path)
    first = resolve_model_path(str(file))
    for name in ("M.GGUF", "m.bin"):
        assert read_tensor_list(resolve_model_path(str(file.rename(tmp_path / name)))) == read_tensor_list(first)
        file = tmp_path / name
    (tmp_path / "nowhere.gguf").symlink_to(tmp_path / "missing")
    with pytest.raises(ModelConfigError, match="a link that leads nowhere"):
        resolve_model_path(str(tmp_path / "nowhere.gguf"))


@pytest.mark.parametrize("fields", [{"llama.rope.scale_linear": 4.0}, {"llama.rope.scaling.factor": 4.0}], ids=str)
def test_a_factor_alone_scales_positions_linearly(tmp_path, fields):
    file, _ = make(tmp_path, fields=fields)
    config = json.loads((resolve_model_path(str(file)) / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "linear" and config["rope_parameters"]["factor"] == 4.0


@pytest.mark.parametrize("more", [None, 1.0, 1.5])
def test_yarn_with_a_factor_on_its_own(tmp_path, more):
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 16.0, "attn_factor": more}
    fields = {f"llama.rope.scaling.{key}": value for key, value in yarn.items()}
    file, _ = make(tmp_path, fields=fields)
    found = rope_frequencies(16, 256, ModelConfig.from_pretrained(str(file)).rope_parameters)
    plain = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    wanted = rope_frequencies(16, 256, plain | {"beta_fast": 16.0})
    torch.testing.assert_close(found[0], wanted[0])
    assert found[1] == pytest.approx(wanted[1] * (more or 1.0))


@pytest.mark.parametrize("size", [0, 3, 100, 3000, -10])
def test_a_truncated_file_is_named(tmp_path, size):
    file, _ = make(tmp_path)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelConfigError, match=r"model.gguf' cannot be read"):
        resolve_model_path(str(file))


def test_rope_factors_are_those_of_the_type_that_made_them(tmp_path):
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    wanted, _ = rope_frequencies(16, 256, llama3)
    plain, _ = rope_frequencies(16, 256, {"rope_type": "default", "rope_theta": 10000.0})
    # As converters write them: what each frequency is divided by.
    file, _ = make(tmp_path, extra={"rope_freqs.weight": plain / wanted})
    config = ModelConfig.from_pretrained(str(file))
    TinyRunner(config)  # they are no weights
    for context in (64, 256):
        found, factor = rope_frequencies(16, context, config.rope_parameters)
        torch.testing.assert_close(found, wanted)
        assert factor == 1.0


def test_a_sliding_window_makes_a_llama_a_mistral(tmp_path):
    file, _ = make(tmp_path, fields={"llama.attention.sliding_window": 32})
    config = ModelConfig.from_pretrained(str(file))
    assert config.architecture == "MistralForCausalLM" and set(config.windows) == {32}


def test_a_sliding_window_hides_what_it_hid_before(tmp_path):
    fields = {"mistral.attention.sliding_window": 32}
    file, model = make(tmp_path, "mistral", fields=fields, sliding_window=32)
    config = ModelConfig.from_pretrained(str(file))
    ids = torch.randint(0, 298, (1, 90), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = model(ids).logits[0]
    torch.testing.assert_close(logits_of(config, ids[0]), wanted, rtol=1e-4, atol=1e-4)


def test_a_sliding_window_of_unknown_layers_is_refused(tmp_path):
    file, _ = make(tmp_path, "qwen2", fields={"qwen2.attention.sliding_window": 32})
    with pytest.raises(ModelConfigError, match=r"a sliding window of 32 tokens, and does not name its layers; give"):
        ModelConfig.from_pretrained(str(file))
    file, _ = make(tmp_path, "qwen2", "longer.gguf", fields={"qwen2.attention.sliding_window": 100_000})
    assert set(ModelConfig.from_pretrained(str(file)).windows) == {None}


# -- tokenizers -----------------------------------------------------------------------------------------------------

TEXTS = (
    "Hello world, it's 12345 o'clock!  \n\n  He'Ll go\tto Zürich—東京は42番目。 ÀÉ naïveTé ñandú",
    "def f(x):\n    return x**2  # ½ + ٣٤ 🎉🎉\r\n\r\n<s>inside</s> _under_score__ CamelCaseWORDS http://a.b/c?d=1",
    "   leading and trailing   ",
    "",
)


class Meta(dict):
    def get(self, key, default=None):
        return super().get(key, default)


def trained(pre_tokenizer, normalizer=None):
    """A byte-level BPE that a corpus of TEXTS taught, with pieces cut by pre_tokenizer."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def as_metadata(tokenizer, pre):
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return Meta(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3 if token in ("<s>", "</s>") else 1 for token in tokens],
            "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.add_bos_token": False,
        }
    )


def splitter(pattern):
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def reference(pre):
    """A pre-tokenizer from transformers' own sources, or from tokenizers, for the name in GGUF files."""
    from tokenizers import normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "gpt-2":
        return byte_level, None
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]), None
    if pre == "qwen2":
        return splitter(PRETOKENIZE_REGEX), normalizers.NFC()
    assert pre == "llama-bpe"
    return splitter(TikTokenConverter("x").pattern), None


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_tokens_are_those_of_the_tokenizer_that_was_converted(tmp_path, pre):
    wanted = trained(*reference(pre))
    rebuilt = GGUFTokenizer.of(as_metadata(wanted, pre))
    rebuilt.save(tmp_path / "tokenizer.json")
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        ids = wanted.encode(text).ids
        if pre != "llama-bpe":  # takes whole pieces that are tokens; the merges lead to the same ones here or not
            assert found.encode(text).ids == ids, text
        assert [piece for piece, _ in found.pre_tokenizer.pre_tokenize_str(text)] == [
            piece for piece, _ in wanted.pre_tokenizer.pre_tokenize_str(text)
        ]
        assert found.decode(ids, skip_special_tokens=False) == wanted.decode(ids, skip_special_tokens=False)


def test_sentencepiece_is_rebuilt_from_scores(tmp_path):
    """Against a plain model of its merging: of all neighbours whose joint is a token, the best score first."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "ca", "cab", "▁c"]
    scores = [0.0] * len(tokens) + [-(i + 1.0) for i in (20, 21, 22, 23, 3, 1, 7, 2, 5, 4, 6, 0)]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    tokens += pieces
    metadata = Meta(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
    )
    rebuilt = GGUFTokenizer.of(metadata)
    rebuilt.save(tmp_path / "tokenizer.json")
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    def plain(text):
        parts = list(("▁" + text).replace(" ", "▁"))
        while True:
            best = None
            for at in range(len(parts) - 1):
                joint = parts[at] + parts[at + 1]
                if joint in pieces and (best is None or scores[tokens.index(joint)] > best[0]):
                    best = scores[tokens.index(joint)], at
            if best is None:
                break
            parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
        ids = []
        for part in parts:
            ids += [tokens.index(part)] if part in pieces else [3 + byte for byte in part.encode()]
        return [1, *ids]

    rng = np.random.default_rng(7)
    for _ in range(200):
        text = "".join(rng.choice(list("abc é"), rng.integers(1, 12)))
        assert found.encode(text).ids == plain(text), text
        assert found.decode(found.encode(text).ids) == text


def test_a_beginning_is_added_where_the_file_or_the_kind_asks_for_it():
    metadata = as_metadata(trained(*reference("llama-bpe")), "llama-bpe")
    assert GGUFTokenizer.of(metadata)._tokenizer.encode("x").ids[0] != 0
    del metadata["tokenizer.ggml.add_bos_token"]
    assert GGUFTokenizer.of(metadata)._tokenizer.encode("x").ids[0] == 0
    with pytest.raises(UnknownTokenizerError, match="no tokenizer"):
        GGUFTokenizer.of(Meta())


def test_the_chat_template_and_the_ends_come_from_the_file(tmp_path):
    template = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    file, _ = make(tmp_path, fields={"tokenizer.chat_template": template, "tokenizer.ggml.eot_token_id": 298})
    folder = ensure_gguf_model(file)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<s>Hi</s>"
    assert ModelConfig.from_pretrained(str(file)).eos_token_ids == (299, 298)
    assert len(read_tensor_list(folder)) == len(gguf.GGUFReader(file).tensors)
    assert tokenizer_fields(300)["tokenizer.ggml.tokens"][tokenizer.eos_token_id] == "</s>"


def test_known_ends_that_the_file_does_not_name_end_an_answer(tmp_path):
    tokens, kinds = (tokenizer_fields(300)[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    for at, token, kind in (
        (290, "<|eot_id|>", 3),
        (291, "<|eom_id|>", 3),
        (292, "<|im_end|>", 1),
        (293, "<|x|>", 3),
    ):
        tokens[at], kinds[at] = token, kind
    file, _ = make(tmp_path, fields={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds})
    assert set(ModelConfig.from_pretrained(str(file)).eos_token_ids) == {290, 291, 299}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_transformers_loads_the_same_file_to_the_same_logits(tmp_path, family):
    pytest.importorskip("accelerate")
    file, _ = make(tmp_path, family, kind=Kind.Q8_0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).eval()
    ids = torch.randint(0, 298, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = theirs(ids).logits[0]
    config = ModelConfig.from_pretrained(str(file), dtype="float32")
    torch.testing.assert_close(logits_of(config, ids[0]), wanted, rtol=1e-4, atol=1e-4)
