"""Quantised checkpoints: what is loaded equals what the stored numbers mean, for every way of storing them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_loader import LlamaConfig, LlamaForCausalLM, load, save
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from sgl_kernel.quantized import FOUR_BITS, MatrixFormat, QuantizedMatrix
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_families import TRANSFORMERS
from sglang.srt.configs.model_files import GGUF_TENSORS, ModelConfigError
from sglang.srt.configs.quantization import WHOLE, QuantizationError, WeightQuantization, read_quantization
from sglang.srt.distributed.parallel_state import SINGLE_RANK
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.mixture import Mixture
from sglang.srt.layers.weights import QuantizedTarget
from sglang.srt.model_loader import loader
from sglang.srt.model_loader.loader import ModelLoadError, load_model, with_weight_format
from sglang.srt.model_loader.quantized_weights import WeightFormats, kept_dtype, pick_weight_formats
from support.thread_group import thread_groups

Q = "model.layers.0.self_attn.q_proj"
# Multiples of eight outputs, for AWQ.
SHAPE = dict(hidden_size=32, intermediate_size=40, head_dim=8)
Tensors = dict[str, torch.Tensor]


def is_quantized(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and "proj" in name


def scaled(weight: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of blocks, written without the code under test."""
    most = torch.finfo(dtype).max if dtype.is_floating_point else 127.0
    values, scales = torch.empty(weight.shape, dtype=dtype), []
    for i in range(0, weight.shape[0], rows):
        scales.append([])
        for j in range(0, weight.shape[1], columns):
            block = weight[i : i + rows, j : j + columns]
            scale = float(block.abs().max()) / most
            scales[-1].append(scale)
            part = block / scale
            values[i : i + rows, j : j + columns] = (part if dtype.is_floating_point else part.round()).to(dtype)
    return values, torch.tensor(scales)


def by_block(rows: int | None, columns: int | None, dtype: torch.dtype, suffix: str, flat: bool = False) -> Callable:
    """rows, columns: None for all."""

    def store(stem: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        block = rows or weight.shape[0], columns or weight.shape[1]
        values, scale = scaled(weight, *block, dtype)
        i, j = (torch.arange(size) // step for size, step in zip(weight.shape, block))
        means = values.float() * scale[i][:, j]
        stored = scale.flatten() if flat else scale
        attention = stem.rpartition(".")[0] if stem.endswith("k_proj") else None
        unused = {f"{attention}.{each}_scale": torch.ones(()) for each in ("q", "k", "v", "kv", "prob") if attention}
        return {
            f"{stem}.weight": values,
            f"{stem}.{suffix}": stored,
            f"{stem}.input_scale": torch.ones(1),
        } | unused, means

    return store


def bits_of(values: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """int32, the first of neighbours along dim in the lowest bits."""
    values = values.movedim(dim, -1)
    words = torch.zeros(*values.shape[:-1], -(-values.shape[-1] * bits // 32), dtype=torch.int64)
    for i in range(values.shape[-1]):
        words[..., i * bits // 32] |= values[..., i] << (i * bits % 32)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).movedim(-1, dim).contiguous()


def in_order(inputs: int, group: int, is_ordered: bool) -> torch.Tensor:
    groups = torch.arange(inputs) // group
    return groups[torch.randperm(inputs)] if is_ordered else groups


def gptq(config: dict, with_biases: bool = False) -> tuple[dict, Callable]:
    config = {"quant_method": "gptq", "desc_act": False, "sym": True} | config
    bits, is_first = config["bits"], config.get("checkpoint_format", "gptq") == "gptq"

    def store(stem: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        group = inputs if config["group_size"] == WHOLE else config["group_size"]
        values = torch.randint(1 << bits, (inputs, outputs))
        zeros = torch.full((inputs // group, outputs), 1 << (bits - 1))
        if not config["sym"]:
            zeros = torch.randint(1 << bits, zeros.shape)
        scales = (torch.rand(inputs // group, outputs) * 0.02).half()
        groups = in_order(inputs, group, config["desc_act"])
        means = (values - zeros[groups]).float() * scales[groups].float()
        stored_zeros = (zeros - 1) % (1 << bits) if is_first else zeros
        return {
            f"{stem}.qweight": bits_of(values, bits, 0),
            f"{stem}.qzeros": bits_of(stored_zeros, bits, 1),
            f"{stem}.scales": scales,
            f"{stem}.g_idx": groups.int(),
        } | ({f"{stem}.bias": torch.zeros(outputs)} if with_biases else {}), means.t().contiguous()

    return config, store


def packed_compressed(bits: int, group_size: int | None, symmetric: bool = True, actorder: str | None = None):
    strategy = "channel" if group_size is None else "group"
    stated = "group" if actorder == "none found" else actorder
    weights = dict(num_bits=bits, type="int", strategy=strategy, symmetric=symmetric, actorder=stated)
    weights["group_size"] = group_size
    groups = {"group_0": {"weights": weights, "targets": ["Linear"], "input_activations": None}}

    def store(stem: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        group = group_size or inputs
        values = torch.randint(1 << bits, (outputs, inputs))
        zeros = torch.full((outputs, inputs // group), 1 << (bits - 1))
        scales = (torch.rand(zeros.shape) * 0.02).bfloat16()
        tensors = {f"{stem}.weight_scale": scales, f"{stem}.weight_shape": torch.tensor(weight.shape)}
        if not symmetric:
            zeros = torch.randint(1 << bits, zeros.shape)
            tensors[f"{stem}.weight_zero_point"] = bits_of(zeros, bits, 0)
        of = in_order(inputs, group, actorder == "group")
        if actorder == "group":
            tensors[f"{stem}.weight_g_idx"] = of.int()
        elif actorder == "none found":
            tensors[f"{stem}.weight_g_idx"] = torch.full((inputs,), -1, dtype=torch.int32)
        tensors[f"{stem}.weight_packed"] = bits_of(values, bits, 1)
        return tensors, (values - zeros[:, of]).float() * scales[:, of].float()

    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return config, store


def awq(group_size: int) -> Callable:
    def store(stem: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        group = inputs if group_size == WHOLE else group_size
        values = torch.randint(16, (inputs, outputs))
        zeros = torch.randint(16, (inputs // group, outputs))
        scales = (torch.rand(inputs // group, outputs) * 0.02).half()
        means = torch.empty(outputs, inputs)
        for i in range(inputs):
            means[:, i] = (values[i] - zeros[i // group]) * scales[i // group].float()
        tensors = {f"{stem}.qweight": packed(values), f"{stem}.qzeros": packed(zeros), f"{stem}.scales": scales}
        return tensors, means

    return store


def packed(values: torch.Tensor) -> torch.Tensor:
    """As AutoAWQ packs for its GEMM kernel: the i-th four bits are of this column of eight."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for word in range(words.shape[1]):
        for i, column in enumerate(order):
            words[:, word] |= values[:, 8 * word + column] << (4 * i)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


FP8, INT8 = torch.float8_e4m3fn, torch.int8


def compressed(strategy: str, dtype: torch.dtype = FP8, **more: object) -> dict:
    kind = "float" if dtype is FP8 else "int"
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, **more}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": f"{kind}-quantized", "config_groups": groups}


WAYS: dict[str, tuple[dict, Callable]] = {
    "fp8, one scale": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        by_block(None, None, FP8, "weight_scale", flat=True),
    ),
    "fp8, blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 12], "activation_scheme": "dynamic"},
        by_block(16, 12, FP8, "weight_scale_inv"),
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        by_block(None, None, FP8, "weight_scale"),
    ),
    "compressed, fp8 by channel": (compressed("channel"), by_block(1, None, FP8, "weight_scale")),
    "compressed, fp8 by flat channel": (compressed("channel"), by_block(1, None, FP8, "weight_scale", flat=True)),
    "compressed, fp8 by block": (
        compressed("block", block_structure=[16, 16]),
        by_block(16, 16, FP8, "weight_scale"),
    ),
    "compressed, fp8 by block as text": (
        compressed("block", block_structure="16x12"),
        by_block(16, 12, FP8, "weight_scale"),
    ),
    "compressed, int8 by channel": (compressed("channel", INT8), by_block(1, None, INT8, "weight_scale")),
    "compressed, int8 by group": (compressed("group", INT8, group_size=4), by_block(1, 4, INT8, "weight_scale")),
    "compressed, int8 by one group": (
        compressed("group", INT8, group_size=WHOLE),
        by_block(1, None, INT8, "weight_scale"),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}, awq(8)),
    "awq, one group": ({"quant_method": "awq", "bits": 4, "group_size": WHOLE, "version": "gemm"}, awq(WHOLE)),
    "gptq": gptq({"bits": 4, "group_size": 8}, with_biases=True),
    "gptq, zeros": gptq({"bits": 4, "group_size": 8, "sym": False, "checkpoint_format": "gptq"}),
    "gptq, second format, ordered": gptq(
        {"bits": 4, "group_size": 8, "sym": False, "checkpoint_format": "gptq_v2", "desc_act": True}
    ),
    "gptq, 8 bits": gptq({"bits": 8, "group_size": 4}),
    "gptq, 8 bits, one group": gptq({"bits": 8, "group_size": WHOLE}),
    "gptq, 8 bits, zeros, one group": gptq({"bits": 8, "group_size": WHOLE, "sym": False}),
    "packed": packed_compressed(4, 8),
    "packed, zeros, ordered": packed_compressed(4, 8, symmetric=False, actorder="group"),
    "packed, no order found": packed_compressed(4, 8, actorder="none found"),
    "packed, 8 bits by channel": packed_compressed(8, None),
    "packed, 8 bits, zeros": packed_compressed(8, 4, symmetric=False, actorder="weight"),
}


@pytest.fixture(params=WAYS)
def checkpoints(request, tmp_path):
    return quantized_and_plain(tmp_path, request.param, LlamaConfig, LlamaForCausalLM, **SHAPE)


def quantized_and_plain(tmp_path, way, *classes, **changes):
    """A quantised checkpoint of two files, the scales in the second, and one with what it means, in float32."""
    stored, plain = tmp_path / "stored", tmp_path / "plain"
    config, store = WAYS[way]
    for path in (stored, plain):
        save(path, *classes, **changes)
    torch.manual_seed(2)
    rewritten: Tensors = {}
    means = load_file(plain / "model.safetensors")
    for name, tensor in list(means.items()):
        if is_quantized(name, tensor):
            tensors, means[name] = store(name.removesuffix(".weight"), tensor)
            rewritten |= tensors
        else:
            rewritten[name] = tensor
    save_file(means, plain / "model.safetensors", metadata={"format": "pt"})
    is_scale = {name: "scale" in name or "qzeros" in name for name in rewritten}
    (stored / "model.safetensors").unlink()
    where = {}
    for file, wanted in (("model-1.safetensors", False), ("model-2.safetensors", True)):
        part = {name: tensor for name, tensor in rewritten.items() if is_scale[name] == wanted}
        save_file(part, stored / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    (stored / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    set_quantization(stored, config)
    return stored, plain


def set_quantization(path, config):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))


@pytest.mark.parametrize(
    ("way", "name"),
    [("modelopt", "hf_quant_config.json"), ("gptq, zeros", "quantize_config.json"), ("awq", "quant_config.json")],
)
def test_it_may_be_told_in_a_file_of_its_own(tmp_path, way, name):
    """As older checkpoints do, and without the method. It names what is cached of them, too."""
    save(tmp_path)
    config = dict(WAYS[way][0])
    del config["quant_method"]
    plain = ModelConfig.from_pretrained(str(tmp_path))
    own = {"producer": {"name": "modelopt"}, "quantization": config} if way == "modelopt" else config
    (tmp_path / name).write_text(json.dumps(own))
    found = ModelConfig.from_pretrained(str(tmp_path))
    set_quantization(tmp_path, WAYS[way][0])
    (tmp_path / name).unlink()
    same = ModelConfig.from_pretrained(str(tmp_path))
    assert (
        found.quantization == same.quantization is not None and found.quantization.method == same.quantization.method
    )
    assert plain.quantization is None and plain.file_stamps != found.file_stamps


def test_config_json_goes_before_a_file_of_its_own(tmp_path):
    save(tmp_path)
    set_quantization(tmp_path, WAYS["awq"][0])
    (tmp_path / "quantize_config.json").write_text('{"bits": 3}')
    assert ModelConfig.from_pretrained(str(tmp_path)).quantization.method == "awq"
    set_quantization(tmp_path, None)
    with pytest.raises(ModelConfigError, match="its GPTQ weights have 3 bits"):
        ModelConfig.from_pretrained(str(tmp_path))
    (tmp_path / "quantize_config.json").write_text("[]")
    with pytest.raises(ModelConfigError, match=r"quantize_config.json' does not hold a JSON object"):
        ModelConfig.from_pretrained(str(tmp_path))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": "FP8"}')
    with pytest.raises(ModelConfigError, match="quantization_config is 'FP8', not an object"):
        ModelConfig.from_pretrained(str(tmp_path))


def all_weights(model) -> Tensors:
    return {name: target.tensor for name, target in model.weight_targets().items()}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("way", ["fp8, blocks", "awq", "gptq, second format, ordered", "packed, zeros, ordered"])
def test_experts_are_dequantized(tmp_path, monkeypatch, way):
    """Without a file being opened for each of their scales."""
    experts = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=40, shared_expert_intermediate_size=24)
    stored, plain = quantized_and_plain(tmp_path, way, Qwen2MoeConfig, Qwen2MoeForCausalLM, **SHAPE | experts)
    opened: list[str] = []
    monkeypatch.setattr(loader, "_open", lambda file, own=loader._open: opened.append(file.name) or own(file))
    got, want = all_weights(load(stored)), all_weights(load(plain))
    assert got.keys() == want.keys() and len(opened) < 10
    for name, tensor in want.items():
        assert torch.allclose(got[name], tensor, atol=1e-6), name


def test_what_is_loaded_is_what_the_numbers_mean(checkpoints):
    stored, plain = map(load, checkpoints)
    theirs = all_weights(plain)
    for name, tensor in all_weights(stored).items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.sampled(8)
@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_reads_its_part(checkpoints, size):
    for group in thread_groups(size):
        models = [
            load_model(ModelConfig.from_pretrained(str(path)), "auto", TorchNativeAttnBackend(), group=group)
            for path in checkpoints
        ]
        theirs = all_weights(models[1])
        for name, tensor in all_weights(models[0]).items():
            assert torch.equal(tensor, theirs[name]), name


def load_as_stored(path, group=SINGLE_RANK):
    """With matrices as a GPU keeps them."""
    config = ModelConfig.from_pretrained(str(path))
    stored = config.quantization
    config = replace(config, weight_format=MatrixFormat(kept_dtype(stored), stored.block[1] if stored.block else 0))
    return load_model(config, "auto", TorchNativeAttnBackend(), group=group)


# With so many ranks. Blocks that the inputs, or a rank's part of them, do not divide into are no format, nor is AWQ
# without blocks.
KEPT = [(way, size) for way in WAYS for size in (1, 2) if way.startswith(("fp8, one", "modelopt", "compressed"))]
KEPT = [each for each in KEPT if "block" not in each[0]]
KEPT += [
    (way, size) for way in ("gptq, 8 bits", "gptq, 8 bits, one group", "packed, 8 bits by channel") for size in (1, 2)
]
KEPT += [(way, 1) for way in ("awq", "gptq", "gptq, zeros", "packed")]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("checkpoints", "size"), KEPT, indirect=["checkpoints"])
def test_what_stays_quantized_means_the_same(checkpoints, size):
    for group in thread_groups(size):
        kept = load_as_stored(checkpoints[0], group)
        plain = load_model(
            ModelConfig.from_pretrained(str(checkpoints[1])), "auto", TorchNativeAttnBackend(), group=group
        )
        theirs, matrices = all_weights(plain), 0
        for name, target in kept.weight_targets().items():
            if isinstance(target, QuantizedTarget):
                matrices += 1
                assert torch.equal(target.matrix.dequantized(torch.float32), theirs[name]), name
            else:
                assert torch.equal(target.tensor, theirs[name]), name
        assert matrices == 2 * 7
        for model in (kept, plain):
            model.finish_loading()
        x = torch.randn(5, 32)
        for ours, their in zip(kept.layers, plain.layers, strict=True):
            assert torch.allclose(ours.self_attn.qkv_proj(x), their.self_attn.qkv_proj(x), atol=1e-5)
            assert torch.allclose(ours.mlp.gate_up_proj(x), their.mlp.gate_up_proj(x), atol=1e-5)


LATENT = dict(
    num_hidden_layers=2,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=8,
    head_dim=8,
    n_routed_experts=8,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=3,
    moe_intermediate_size=96,
    first_k_dense_replace=1,
    initializer_range=0.2,
)
QWEN = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=96, shared_expert_intermediate_size=32)
MIXTURES = {
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM, QWEN),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("way", ["modelopt", "compressed, int8 by group", "gptq", "awq"])
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_mixtures_that_stay_quantized_compute_the_same(tmp_path, way, family, size):
    *classes, changes = MIXTURES[family]
    paths = quantized_and_plain(tmp_path, way, *classes, **SHAPE | changes)
    config, plain_config = (ModelConfig.from_pretrained(str(path)) for path in paths)
    stored = config.quantization
    format = MatrixFormat(kept_dtype(stored), stored.block[1] if stored.block else 0)
    config = replace(config, weight_format=format, expert_format=format)
    x, results = torch.randn(7, 32), []
    for group in thread_groups(size):
        kept, plain = (
            load_model(each, "auto", TorchNativeAttnBackend(), group=group) for each in (config, plain_config)
        )
        theirs = all_weights(plain)
        for name, target in kept.weight_targets().items():
            if ".experts." in name:
                # Parts of other sizes, which are checked by what they compute.
                assert isinstance(target, QuantizedTarget), name
            elif isinstance(target, QuantizedTarget):
                assert torch.equal(target.matrix.dequantized(torch.float32), theirs[name]), name
            else:
                assert torch.equal(target.tensor, theirs[name]), name
        for model in (kept, plain):
            model.finish_loading()
        results.append((kept, plain))
    for layer in range(2):
        # One rank after the other, without a sum over them.
        ours, theirs = (
            sum(experts_alone(models[which].layers[layer].mlp, x) for models in results) for which in (0, 1)
        )
        assert torch.allclose(ours, theirs, atol=1e-4)


def experts_alone(mlp, x):
    """A rank's part of a mixture's result."""
    if not isinstance(mlp, Mixture):
        return torch.zeros(1)
    weights, chosen = mlp.router(x)
    return mlp.experts(x, chosen, weights)


def test_what_is_not_quantized_is_when_its_layer_stays_so(tmp_path):
    """Made-up weights, for example."""
    config = replace(ModelConfig.from_pretrained(str(quantized(tmp_path))), weight_format=MatrixFormat(torch.int8))
    kept = load_model(config, "dummy", TorchNativeAttnBackend(), seed=3).weight_targets()
    plain = all_weights(load(tmp_path, "dummy", seed=3))
    for name, target in kept.items():
        if isinstance(target, QuantizedTarget):
            error = (target.matrix.dequantized(torch.float32) - plain[name]).abs().amax(1)
            assert bool((error <= 0.51 * target.matrix.scales[:, 0]).all()), name
        else:
            assert torch.equal(target.tensor, plain[name]), name


BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}


@pytest.mark.parametrize(
    ("config", "changes", "format", "reason"),
    [
        (BLOCKS, {}, MatrixFormat(FP8, 32), "weights of decoder layers are kept in 8 bits"),
        ({"quant_method": "fp8"}, {}, MatrixFormat(FP8), "in 8 bits"),
        (compressed("channel", INT8), {}, MatrixFormat(INT8), "in 8 bits"),
        (WAYS["awq"][0] | {"group_size": 32}, {}, MatrixFormat(FOUR_BITS, 32), "in 4 bits"),
        (BLOCKS, {"device": "cpu"}, None, "on a CPU there is no faster kernel"),
        (BLOCKS, {"dtype": torch.float32}, None, "kernels are for bfloat16 and float16"),
        (BLOCKS, {"capability": (8, 0)}, None, "this GPU does not compute with e4m3"),
        (compressed("channel", INT8), {"capability": (8, 0)}, MatrixFormat(INT8), "in 8 bits"),
        (BLOCKS, {"ranks": 2}, None, "48 inputs do not divide into groups of 32"),
        (BLOCKS | {"weight_block_size": [24, 24]}, {}, None, "64 inputs do not divide into groups of 24"),
        (BLOCKS, {"names": [f"{Q}.weight"]}, None, f"{Q}.weight is not quantized"),
        (BLOCKS, {"names": [f"{Q}.weight", f"{Q}.weight_scale_inv"]}, MatrixFormat(FP8, 32), "in 8 bits"),
        (WAYS["awq, one group"][0], {}, None, "the kernel is for groups of inputs"),
        (WAYS["gptq, zeros"][0] | {"group_size": 32}, {}, MatrixFormat(FOUR_BITS, 32), "in 4 bits"),
        (WAYS["gptq, 8 bits"][0] | {"group_size": 32}, {}, MatrixFormat(INT8, 32), "in 8 bits"),
        (WAYS["gptq, 8 bits, zeros, one group"][0], {}, None, "the kernel for 8 bits knows no zeros"),
        (WAYS["gptq, second format, ordered"][0], {}, None, "the inputs of a group are no neighbours"),
        (packed_compressed(4, 32)[0], {}, MatrixFormat(FOUR_BITS, 32), "in 4 bits"),
        (BLOCKS, {"names": ["lm_head.weight"]}, MatrixFormat(FP8, 32), "in 8 bits"),
    ],
)  # fmt: skip
def test_a_gpu_keeps_what_its_kernels_read(tmp_path, caplog, monkeypatch, config, changes, format, reason):
    caplog.set_level("INFO")
    save(tmp_path, **SHAPE | dict(hidden_size=64, intermediate_size=96, head_dim=16))
    set_quantization(tmp_path, config)
    capability = changes.get("capability", (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    model = replace(ModelConfig.from_pretrained(str(tmp_path)), dtype=changes.get("dtype", torch.bfloat16))
    device = torch.device(changes.get("device", "cuda"))
    found = pick_weight_formats(model, changes.get("names", ()), changes.get("ranks", 1), device)
    assert found == WeightFormats(format)
    assert reason in caplog.text


EXPERT, SHARED = "model.layers.1.mlp.experts.3.down_proj", "model.layers.1.mlp.shared_experts.up_proj"
KEPT_FP8 = MatrixFormat(FP8, 32)


@pytest.mark.parametrize(
    ("changes", "names", "ranks", "formats", "reason"),
    [
        ({}, [], 1, WeightFormats(KEPT_FP8, KEPT_FP8), "weights of experts are kept in 8 bits"),
        ({}, [f"{Q}.weight"], 1, WeightFormats(None, KEPT_FP8), f"decoder layers are kept in bfloat16: {Q}"),
        ({}, [f"{SHARED}.weight"], 1, WeightFormats(None, KEPT_FP8), f"{SHARED}.weight is not quantized"),
        ({}, [f"{EXPERT}.weight"], 1, WeightFormats(KEPT_FP8, None), f"{EXPERT}.weight is not quantized"),
        ({}, ["model.layers.0.mlp.experts.down_proj"], 1, WeightFormats(KEPT_FP8, None), "is not quantized"),
        ({}, [f"{EXPERT}.weight", f"{EXPERT}.weight_scale_inv"], 1, WeightFormats(KEPT_FP8, KEPT_FP8), "8 bits"),
        # Layers that predict further tokens, a router, and what is dequantised anyway.
        (
            {},
            ["model.layers.2.eh_proj.weight", "model.layers.1.mlp.gate.weight", f"{Q[:-6]}kv_b_proj.weight"],
            1,
            WeightFormats(KEPT_FP8, KEPT_FP8),
            "8 bits",
        ),
        # Each of a rank's inputs counts, but of experts those of all ranks.
        ({"moe_intermediate_size": 96}, [], 2, WeightFormats(None, KEPT_FP8), "48 inputs do not divide"),
        ({"moe_intermediate_size": 96, "n_shared_experts": 2}, [], 2, WeightFormats(KEPT_FP8, KEPT_FP8), "8 bits"),
        ({"moe_intermediate_size": 72, "n_shared_experts": 4}, [], 1, WeightFormats(KEPT_FP8, None), "72 inputs"),
        ({"q_lora_rank": 40}, [], 1, WeightFormats(None, KEPT_FP8), "40 inputs do not divide"),
        ({"v_head_dim": 12}, [], 1, WeightFormats(None, KEPT_FP8), "48 inputs do not divide"),
        ({"intermediate_size": 72}, [], 1, WeightFormats(None, KEPT_FP8), "72 inputs do not divide"),
        ({"intermediate_size": 72, "first_k_dense_replace": 0}, [], 1, WeightFormats(KEPT_FP8, KEPT_FP8), "8 bits"),
    ],
)  # fmt: skip
def test_experts_and_the_other_layers_may_be_kept_otherwise(
    tmp_path, caplog, monkeypatch, changes, names, ranks, formats, reason
):
    caplog.set_level("INFO")
    shape = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "v_head_dim": 16}
    config = DeepseekV3Config(**LATENT | shape | changes)
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(tmp_path)
    set_quantization(tmp_path, BLOCKS)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    model = replace(ModelConfig.from_pretrained(str(tmp_path)), dtype=torch.bfloat16)
    assert pick_weight_formats(model, names, ranks, torch.device("cuda")) == formats
    assert reason in caplog.text


def wide(tmp_path) -> ModelConfig:
    """A checkpoint that is not quantised, whose inputs divide into groups."""
    save(tmp_path, **SHAPE | dict(hidden_size=64, intermediate_size=96, head_dim=16))
    return replace(ModelConfig.from_pretrained(str(tmp_path)), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("asked", "changes", "message"),
    [
        ("awq", {}, "--quantization awq: the checkpoint is not quantized; leave the flag out, or use fp8"),
        ("fp8", {"device": "cpu"}, "cannot be used here: on a CPU there is no faster kernel; leave it out"),
        ("fp8", {"dtype": torch.float32}, "cannot be used here: kernels are for bfloat16 and float16"),
        ("fp8", {"capability": (8, 0)}, "cannot be used here: this GPU does not compute with e4m3"),
        ("fp8", {"ranks": 2}, "48 inputs do not divide into groups of 32"),
        ("fp8", {"model_impl": TRANSFORMERS}, "for models with a native implementation"),
        ("fp8", {"quantization": WeightQuantization(bits=4, method="awq")}, "the checkpoint has awq; leave the"),
        ("fp8", {"is_gguf": True}, "not for a GGUF file"),
    ],
)
def test_what_quantization_cannot_do_is_refused(tmp_path, monkeypatch, asked, changes, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: changes.get("capability", (9, 0)))
    fields = {name: changes[name] for name in ("dtype", "model_impl", "quantization") if name in changes}
    config, device = replace(wide(tmp_path), **fields), torch.device(changes.get("device", "cuda"))
    if changes.get("is_gguf"):
        (tmp_path / GGUF_TENSORS).touch()
    with pytest.raises(ModelConfigError, match=message):
        with_weight_format(config, "auto", changes.get("ranks", 1), device, asked)


def test_the_checkpoints_own_quantization_may_be_named(tmp_path):
    config = ModelConfig.from_pretrained(str(quantized(tmp_path, way="awq")))
    cpu = torch.device("cpu")
    for asked in (None, "awq"):
        assert with_weight_format(config, "auto", 1, cpu, asked).weight_format is None


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_are_quantised_when_they_are_read(tmp_path, monkeypatch, num_ranks):
    """Each part of a rank's by itself: half a step of e4m3 is all that a value loses."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    plain = wide(tmp_path)
    config = with_weight_format(plain, "auto", 1, torch.device("cuda"), "fp8")
    assert config.weight_format == MatrixFormat(FP8)
    assert config.fingerprint() != plain.fingerprint(), "its keys and values are others"
    of_awq = replace(plain, quantization=WeightQuantization(bits=4))
    kept_so = replace(of_awq, weight_format=MatrixFormat(FOUR_BITS, 32))
    assert kept_so.fingerprint() == of_awq.fingerprint(), "a checkpoint's numbers are the same"
    assert kept_so.fingerprint("dummy") != of_awq.fingerprint("dummy"), "made-up ones are quantised"
    assert with_weight_format(plain, "auto", 1, torch.device("cuda")) == plain
    backend = TorchNativeAttnBackend()
    for group in thread_groups(num_ranks):
        kept, exact = (load_model(each, "auto", backend, group=group) for each in (config, plain))
        wanted, num_quantised = exact.weight_targets(), 0
        for name, target in kept.weight_targets().items():
            if not isinstance(target, QuantizedTarget):
                assert torch.equal(target.tensor, wanted[name].tensor), name
                continue
            num_quantised += 1
            exactly = wanted[name].tensor.float()
            error = (target.matrix.dequantized(torch.float32) - exactly).abs()
            least = exactly.abs().amax(1, keepdim=True) / torch.finfo(FP8).max * 2**-10
            assert bool((error <= exactly.abs() * 2**-4 + least).all()), name
        assert num_quantised == 7 * config.num_layers


def quantized(tmp_path, change: Callable[[Tensors], None] = lambda tensors: None, way: str = "fp8, blocks"):
    """A checkpoint of one file, changed."""
    save(tmp_path, **SHAPE)
    config, store = WAYS[way]
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        stored = store(name.removesuffix(".weight"), tensor)[0] if is_quantized(name, tensor) else {name: tensor}
        tensors |= stored
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    set_quantization(tmp_path, config)
    return tmp_path


def scale_of(value: float) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{Q}.weight_scale": torch.tensor([value])})


def nan_of_8_bits(byte: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors[f"{Q}.weight"].view(torch.uint8)[3, 5].fill_(byte)


SCALE_IS = f"'{Q}.weight_scale' in model.safetensors holds {{}}, and scales of weights are finite "


@pytest.mark.parametrize(
    ("way", "change", "message"),
    [
        ("fp8, blocks", lambda t: t.pop(f"{Q}.weight_scale_inv"), f"no '{Q}.weight_scale' beside it"),
        (
            "fp8, blocks",
            lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(3, 3)}),
            r"has the shape \(3, 3\); a matrix of 32 by 32 in blocks of 16 by 12 has \(2, 3\)",
        ),
        (
            "fp8, blocks",
            lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].bfloat16()}),
            f"'{Q}.weight' has a scale beside it, but is no matrix of float8_e4m3fn",
        ),
        (
            "fp8, blocks",
            lambda t: t.update({"model.norm.weight_scale": torch.ones(1)}),
            "'model.norm.weight' has a scale beside it, but is no matrix",
        ),
        ("awq", lambda t: t.pop(f"{Q}.qzeros"), f"There is no '{Q}.qzeros' beside '{Q}.qweight'"),
        ("awq", lambda t: t.update({f"{Q}.scales": torch.ones(4, 8)}), r"scales of .* have the shape \(4, 8\)"),
        ("awq", lambda t: t.pop(f"{Q}.qweight"), f"missing: {Q}.weight"),
        (
            "awq",
            lambda t: t.update({f"{Q}.qweight": torch.ones(3)}),
            f"'{Q}.qweight' holds packed numbers, but is no matrix of int32",
        ),
        (
            "awq",
            lambda t: t.update({f"{Q}.qzeros": t[f"{Q}.qzeros"].float()}),
            "zeros of .* have the type torch.float32",
        ),
        ("gptq", lambda t: t[f"{Q}.bias"][3].fill_(1), f"unexpected: {Q}.bias"),
        ("gptq", lambda t: t[f"{Q}.g_idx"][3].fill_(4), "not 32 numbers from 0 to 3"),
        ("packed, zeros, ordered", lambda t: t.pop(f"{Q}.weight_zero_point"), f"no '{Q}.weight_zero_point' beside"),
        (
            "fp8, one scale",
            lambda t: t.update({f"{Q}.qweight": t.pop(f"{Q}.weight")}),
            "holds packed numbers, of which",
        ),
        ("fp8, blocks", lambda t: t.update({f"{Q}.weight": torch.ones(()).to(FP8)}), f"'{Q}.weight' has a scale"),
        ("fp8, blocks", lambda t: t.update({"more.weight": torch.ones(2, 2)}), "unexpected: more.weight"),
        ("fp8, one scale", scale_of(math.nan), SCALE_IS.format("nan")),
        ("fp8, one scale", scale_of(math.inf), SCALE_IS.format("inf")),
        ("fp8, one scale", scale_of(0.0), SCALE_IS.format("0") + "floats from 0, not all of them 0"),
        ("fp8, one scale", scale_of(-0.5), SCALE_IS.format("-0.5")),
        ("fp8, one scale", scale_of(1), SCALE_IS.format("int64")),
        ("compressed, int8 by channel", lambda t: t[f"{Q}.weight_scale"][3].fill_(-1), SCALE_IS.format("-1")),
        (
            "fp8, blocks",
            lambda t: t[f"{Q}.weight_scale_inv"][1, 2].fill_(math.nan),
            "weight_scale_inv' in .* holds nan",
        ),
        ("awq", lambda t: t[f"{Q}.scales"][0, 2].fill_(math.inf), f"'{Q}.scales' in model.safetensors holds inf"),
        ("fp8, one scale", nan_of_8_bits(0x7F), f"NaN or infinite numbers, read as float32: {Q}.weight;"),
        ("fp8, one scale", nan_of_8_bits(0xFF), f"NaN or infinite numbers, read as float32: {Q}.weight;"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, way, change, message):
    with pytest.raises(ModelLoadError, match=message):
        load(quantized(tmp_path, change, way))


def test_some_scales_of_0_are_loaded(tmp_path):
    model = load(quantized(tmp_path, lambda t: t[f"{Q}.weight_scale"][3].fill_(0), "compressed, int8 by channel"))
    assert not bool(model.weight_targets()[f"{Q}.weight"].tensor[3].any())


def is_finite(target: QuantizedTarget) -> bool:
    return all(math.isfinite(each) for each in target.extremes())


@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_a_matrix_that_stays_quantized_shows_what_is_not_finite(dtype):
    matrix = QuantizedMatrix.empty(MatrixFormat(dtype), 4, 16)
    target = QuantizedTarget.of(matrix, (4, 16), 0, 0)
    weight = torch.arange(-32.0, 32.0).reshape(4, 16)
    target.fill(weight)
    assert is_finite(target)
    if dtype is FP8:
        for byte in range(256):
            matrix.values.view(torch.uint8)[1, 2] = byte
            assert is_finite(target) == (byte & 0x7F != 0x7F), byte
    for value in (math.nan, math.inf, -math.inf):
        weight[2, 3] = value
        target.fill(weight)
        assert not is_finite(target), value


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "quip"}, "quantized as 'quip', which is not supported; use fp8, compressed-"),
        (
            {"quant_method": "gptq", "bits": 3, "group_size": 128},
            "have 3 bits, the format 'gptq' and words of 'int32'",
        ),
        (gptq({"bits": 4, "group_size": 8, "checkpoint_format": "marlin"})[0], "the format 'marlin'"),
        (gptq({"bits": 4, "group_size": 8, "pack_dtype": "int8"})[0], "words of 'int8'; only 4 and 8 bits"),
        ({"quant_method": "gptq", "bits": 4}, r"blocks of \(1, None\), not of two sizes above 0"),
        (packed_compressed(3, 8)[0], "packed compressed-tensors are not of 4 or 8 bits"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "kind 'e5m2', and only e4m3 is read"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"blocks of \[0, 128\], not of two sizes above 0"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "blocks of 128, not of two sizes"),
        (compressed("tensor") | {"format": "mixed-precision"}, "have the format 'mixed-precision'"),
        (compressed("token", INT8) | {"format": "pack-quantized"}, "packed .* have the strategy 'token'"),
        (compressed("tensor") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "are sparse"),
        (compressed("tensor") | {"config_groups": {}}, "have 0 ways of storing weights"),
        (compressed("tensor") | {"config_groups": []}, "have 0 ways of storing weights"),
        (compressed("tensor") | {"config_groups": ["x"]}, r"config_groups is \['x'\], not an object"),
        (compressed("tensor") | {"config_groups": {"a": None}}, "one of its config_groups is None, not an object"),
        (compressed("tensor") | {"sparsity_config": "x"}, "sparsity_config is 'x', not an object"),
        ({"quant_method": ["fp8"]}, r"quantized as \['fp8'\], which is not supported"),
        (compressed("tensor", num_bits=4), "not of 8 symmetric bits"),
        (compressed("tensor", symmetric=False), "not of 8 symmetric bits"),
        (compressed("token"), "the strategy 'token'"),
        (compressed("block", block_structure="16"), "blocks of '16', not of two sizes above 0"),
        (compressed("group", group_size=0), r"blocks of \(1, 0\), not of two sizes above 0"),
        ({"quant_method": "awq", "bits": 8}, "have 8 bits"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt weights have the quant_algo 'NVFP4'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point False"),
    ],
)
def test_other_ways_are_refused(tmp_path, config, message):
    save(tmp_path)
    set_quantization(tmp_path, config)
    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.from_pretrained(str(tmp_path))


@pytest.mark.sampled(4)
def test_a_scale_that_the_index_names_and_no_file_has(checkpoints):
    index = checkpoints[0] / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    scales = [name for name in where if name.startswith(Q) and ("weight_scale" in name or "qzeros" in name)]
    assert scales
    where[scales[0]] = "model-1.safetensors"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    with pytest.raises(ModelLoadError, match=f"model-1.safetensors does not hold '{scales[0]}', although"):
        load(checkpoints[0])


def test_a_group_of_activations_alone_and_a_type_that_is_left_out():
    config = compressed("channel", INT8)
    del config["config_groups"]["group_0"]["weights"]["type"]
    config["config_groups"]["attention"] = {"weights": None, "input_activations": {}}
    assert read_quantization(config) == WeightQuantization(is_int=True)


@pytest.mark.parametrize("impl", ["auto", TRANSFORMERS])
@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": {"num_bits": 8}},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        compressed("tensor") | {"config_groups": {"attention": {"weights": None, "input_activations": {}}}},
    ],
    ids=["compressed-tensors", "modelopt", "attention's"],
)
def test_scales_for_the_kv_cache_alone_leave_weights_as_they_are(tmp_path, config, impl):
    save(tmp_path)
    set_quantization(tmp_path, config)
    model = ModelConfig.from_pretrained(str(tmp_path), model_impl=impl)
    assert model.quantization is None
    load_model(model, "auto", TorchNativeAttnBackend())


def test_the_earlier_name_of_the_config(tmp_path):
    save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"compression_config": compressed("tensor")}))
    found = ModelConfig.from_pretrained(str(tmp_path)).quantization
    assert found == WeightQuantization() and found.method == "compressed-tensors"


def test_a_config_that_is_no_object_is_refused():
    with pytest.raises(QuantizationError, match="is 'fp8', not an object"):
        read_quantization("fp8")


def test_transformers_code_takes_no_quantized_weights(tmp_path):
    with pytest.raises(ModelConfigError, match="which a model that transformers computes must not be"):
        ModelConfig.from_pretrained(str(quantized(tmp_path)), model_impl="transformers")


def test_the_stored_way_is_part_of_what_names_cached_kv(tmp_path):
    """As it is of the weights."""
    paths = [tmp_path / "plain", tmp_path / "stored"]
    save(paths[0], LlamaConfig, **SHAPE)
    quantized(paths[1])
    plain, stored = (ModelConfig.from_pretrained(str(path)).fingerprint() for path in paths)
    assert plain != stored
