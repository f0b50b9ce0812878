"""`load_model`: what it loads, what it refuses, and what "dummy" means."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_families import TRANSFORMERS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_loader.loader import ModelLoadError, load_model
from support.thread_group import thread_groups

SHAPE = dict(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
)


def save(path, config_class=LlamaConfig, model_class=LlamaForCausalLM, shard=None, **changes):
    torch.manual_seed(1)
    model = model_class(config_class(**SHAPE | changes))
    model.save_pretrained(path, **({"max_shard_size": shard} if shard else {}))
    return model


def load(path, load_format="auto", seed=0, dtype="auto"):
    return load_model(
        ModelConfig.from_pretrained(str(path), dtype=dtype), load_format, TorchNativeAttnBackend(), seed
    )


EXPERTS = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=20)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize(
    ("classes", "changes"),
    [
        ((MixtralConfig, MixtralForCausalLM), {"num_local_experts": 3}),
        ((Qwen3MoeConfig, Qwen3MoeForCausalLM), EXPERTS),
        # Without width; its tensors are saved.
        ((Qwen2MoeConfig, Qwen2MoeForCausalLM), EXPERTS | {"shared_expert_intermediate_size": 0}),
        ((Qwen2MoeConfig, Qwen2MoeForCausalLM), EXPERTS | {"shared_expert_intermediate_size": 12}),
    ],
)
def test_experts_may_be_stacked(tmp_path, classes, changes):
    """As transformers has them in memory, one tensor for all of a layer."""
    for name, is_stacked in (("one by one", False), ("stacked", True)):
        torch.manual_seed(1)
        model = classes[1](classes[0](**SHAPE | changes))
        model.save_pretrained(tmp_path / name, save_original_format=not is_stacked)
    want, got = (load(tmp_path / name).weight_targets() for name in ("one by one", "stacked"))
    assert got.keys() == want.keys() and any("experts.2." in name for name in got)
    assert all(torch.equal(got[name].tensor, target.tensor) for name, target in want.items())

    def cut(tensors):
        for name in tensors:
            if name.endswith("experts.down_proj"):
                tensors[name] = tensors[name][:2].clone()

    rewrite(tmp_path / "stacked", cut)
    with pytest.raises(ModelLoadError, match=r"experts.down_proj' has the shape \(2, 16, "):
        load(tmp_path / "stacked")


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("shard", [None, "5KB"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("classes", [(LlamaConfig, LlamaForCausalLM), (Qwen3Config, Qwen3ForCausalLM)])
def test_every_tensor_arrives(tmp_path, classes, tied, shard):
    theirs = save(tmp_path, *classes, shard=shard, tie_word_embeddings=tied)
    assert len(list(tmp_path.glob("*.safetensors"))) == (1 if shard is None else len(list(tmp_path.glob("model-*"))))
    model = load(tmp_path)
    stored = theirs.state_dict()
    if tied:
        stored.pop("lm_head.weight")
    targets = model.weight_targets()
    assert targets.keys() == stored.keys()
    for name, tensor in stored.items():
        ours = targets[name].tensor
        assert torch.equal(ours, tensor.expand_as(ours)), name
    # The targets are views that cover the parameters: nothing stays as torch.empty left it.
    assert sum(t.tensor.numel() for t in targets.values()) == sum(p.numel() for p in model.parameters())
    assert not any(p.requires_grad for p in model.parameters())
    assert (model.lm_head.weight is model.embed_tokens.weight) == tied


@pytest.mark.parametrize("architecture", ["Qwen3Model", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_saved_without_its_head_is_read_for_embeddings(tmp_path, architecture, tied):
    """As Qwen3-Embedding and e5-mistral are."""
    theirs = save(tmp_path, Qwen3Config, Qwen3ForCausalLM, tie_word_embeddings=tied).model
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3Model"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    model = load(tmp_path)
    targets = model.weight_targets()
    assert targets.keys() == {f"model.{name}" for name in theirs.state_dict()}
    for name, tensor in theirs.state_dict().items():
        ours = targets[f"model.{name}"].tensor
        assert torch.equal(ours, tensor.expand_as(ours)), name
    assert model.lm_head.weight is model.embed_tokens.weight

    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["embed_tokens.weight"] + 1}))
    assert ("lm_head.weight" in load(tmp_path).weight_targets()) == (not tied)
    rewrite(tmp_path, lambda tensors: tensors.update(more=torch.zeros(1)))
    with pytest.raises(ModelLoadError, match="unexpected: more"):
        load(tmp_path)


def test_converts_dtype(tmp_path):
    theirs = save(tmp_path)
    model = load(tmp_path, dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.lm_head.weight, theirs.lm_head.weight.to(torch.bfloat16))


def test_ignores_what_old_checkpoints_carry(tmp_path):
    save(tmp_path, tie_word_embeddings=True)

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
        tensors["lm_head.weight"] = torch.zeros(50, 16)

    rewrite(tmp_path, add)
    assert bool(load(tmp_path).lm_head.weight.any())


def test_names_what_does_not_fit(tmp_path):
    save(tmp_path)

    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(1)

    rewrite(tmp_path, change)
    with pytest.raises(ModelLoadError) as e:
        load(tmp_path)
    assert "missing: model.layers.1.mlp.up_proj.weight;" in str(e.value)
    assert "unexpected: model.layers.7.mlp.up_proj.weight." in str(e.value)


def fuse(tensors, parts, fused):
    """Replace the separate projections `parts` of every layer by one tensor."""
    for kind in ("weight", "bias"):
        for layer in range(SHAPE["num_hidden_layers"]):
            names = [f"model.layers.{layer}.{part}.{kind}" for part in parts]
            if names[0] in tensors:
                tensors[f"model.layers.{layer}.{fused}.{kind}"] = torch.cat([tensors.pop(name) for name in names])


QKV = [f"self_attn.{name}_proj" for name in "qkv"], "self_attn.qkv_proj"
GATE_UP = ["mlp.gate_proj", "mlp.up_proj"], "mlp.gate_up_proj"


@pytest.mark.parametrize("fusions", [(QKV,), (GATE_UP,), (QKV, GATE_UP)], ids=["qkv", "gate_up", "both"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_fused_projections(tmp_path, fusions, size):
    save(tmp_path, attention_bias=True, mlp_bias=True, initializer_range=0.5)
    rewrite(tmp_path, lambda tensors: [t.uniform_() for name, t in tensors.items() if name.endswith("bias")])
    config = ModelConfig.from_pretrained(str(tmp_path))

    def parameters():
        models = (load_model(config, "auto", TorchNativeAttnBackend(), group=group) for group in thread_groups(size))
        return [dict(model.named_parameters()) for model in models]

    separate = parameters()
    rewrite(tmp_path, lambda tensors: [fuse(tensors, *fusion) for fusion in fusions])
    for mine, theirs in zip(parameters(), separate):
        for name, parameter in theirs.items():
            assert torch.equal(mine[name], parameter), name


def test_a_fused_projection_of_another_shape_or_beside_its_parts_is_refused(tmp_path):
    save(tmp_path)
    rewrite(tmp_path, lambda tensors: fuse(tensors, *GATE_UP))
    name = "model.layers.1.mlp.gate_up_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name][1:].clone()}))
    with pytest.raises(ModelLoadError, match=r"gate_up_proj.weight' has the shape \(47, 16\).*\(48, 16\)"):
        load(tmp_path)
    save(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.zeros(48, 16)}))
    with pytest.raises(ModelLoadError, match=f"unexpected: {name}"):
        load(tmp_path)


def test_names_a_wrong_shape(tmp_path):
    save(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.embed_tokens.weight": torch.zeros(16)}))
    with pytest.raises(ModelLoadError, match=r"embed_tokens.weight' has the shape \(16,\).*\(50, 16\)"):
        load(tmp_path)


@pytest.mark.parametrize("impl", ["auto", TRANSFORMERS])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_names_what_is_not_finite(tmp_path, value, impl):
    name = "model.layers.1.mlp.up_proj.weight"
    save(tmp_path, shard="5KB")
    file = next(path for path in tmp_path.glob("model-*.safetensors") if name in load_file(path))
    tensors = load_file(file)
    tensors[name][5, 3] = value
    save_file(tensors, file, metadata={"format": "pt"})
    config = ModelConfig.from_pretrained(str(tmp_path), dtype="bfloat16", model_impl=impl)
    where = tmp_path.name if impl == TRANSFORMERS else file.name
    with pytest.raises(
        ModelLoadError, match=f"^{where} holds NaN or infinite numbers, read as bfloat16: .*{name}; fetch"
    ):
        load_model(config, "auto", TorchNativeAttnBackend())


def test_numbers_that_a_type_cannot_hold_are_named(tmp_path):
    save(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors["model.norm.weight"].fill_(1e6))
    load(tmp_path, dtype="bfloat16")
    with pytest.raises(ModelLoadError, match=r"as float16: model\.norm\.weight; .*or choose another --dtype"):
        load(tmp_path, dtype="float16")


def test_refuses_files_that_are_not_there_or_broken(tmp_path):
    save(tmp_path, shard="5KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    shards[1].rename(tmp_path / "elsewhere")
    with pytest.raises(ModelLoadError, match=f"not there: {shards[1].name}"):
        load(tmp_path)
    (tmp_path / "elsewhere").rename(shards[1])
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelLoadError, match="incomplete download"):
        load(tmp_path)
    shards[1].write_bytes(whole)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = next(s.name for s in shards if "lm_head.weight" not in load_file(s))
    index.write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=r"does not hold 'lm_head\.weight'"):
        load(tmp_path)


def test_an_index_of_shards_that_became_a_single_file_is_left_aside(tmp_path):
    save(tmp_path)
    expected = load(tmp_path).state_dict()
    stale = {"weight_map": dict.fromkeys(expected, "model-00001-of-00002.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(stale))
    loaded = load(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_an_index_that_names_the_single_file_and_another_is_read(tmp_path):
    """Tools write what they add, as heads for several tokens, into a file of its own."""
    save(tmp_path)
    expected = load(tmp_path).state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({"lm_head.weight": tensors.pop("lm_head.weight")}, tmp_path / "extra.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    weight_map = dict.fromkeys(tensors, "model.safetensors") | {"lm_head.weight": "extra.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = load(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_files_without_an_index_that_hold_the_same_are_refused(tmp_path):
    save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "part-1.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"] * 2}, tmp_path / "part-2.safetensors")
    with pytest.raises(ModelLoadError, match=r"part-1.* and part-2.* both hold 'model\.norm\.weight'"):
        load(tmp_path)


def test_refuses_other_formats(tmp_path):
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors"):
        load(tmp_path)
    with pytest.raises(ModelLoadError, match="'npz' is not supported; choose from auto"):
        load(tmp_path, load_format="npz")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dummy_weights_come_from_the_seed(tmp_path, dtype):
    save(tmp_path, Qwen3Config, Qwen3ForCausalLM)
    (tmp_path / "model.safetensors").unlink()
    first, again, other = (
        {name: target.tensor for name, target in load(tmp_path, "dummy", seed, dtype).weight_targets().items()}
        for seed in (1, 1, 2)
    )
    for name, tensor in first.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, again[name]), name
        if name.endswith("norm.weight"):
            assert bool((tensor == 1).all()), name
        else:
            assert not torch.equal(tensor, other[name]), name
            assert 0.5 < tensor.float().std() * (1 if "embed" in name else tensor.shape[-1] ** 0.5) < 1.5, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_dummy_weights_on_a_gpu_come_from_the_seed_too(tmp_path):
    save(tmp_path, Qwen3Config, Qwen3ForCausalLM)
    config = ModelConfig.from_pretrained(str(tmp_path), dtype="bfloat16")
    first, again, other = (
        dict(load_model(config, "dummy", TorchNativeAttnBackend(), seed, torch.device("cuda")).named_parameters())
        for seed in (1, 1, 2)
    )
    for name, tensor in first.items():
        assert tensor.is_cuda and torch.equal(tensor, again[name]), name
        assert torch.equal(tensor, other[name]) == ("norm" in name), name
