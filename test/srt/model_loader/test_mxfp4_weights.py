"""gpt-oss's experts of 4 bits: what is loaded equals what transformers makes of them, on one rank and on several."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sgl_kernel.quantized import E2M1, E2M1_VALUES, MatrixFormat
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_families import TRANSFORMERS
from sglang.srt.configs.model_files import ModelConfigError
from sglang.srt.configs.quantization import Packing, WeightQuantization
from sglang.srt.distributed.parallel_state import SINGLE_RANK
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.weights import QuantizedTarget
from sglang.srt.model_loader.loader import ModelLoadError, drawn_dtype, load_model, with_weight_format
from sglang.srt.model_loader.mxfp4_weights import Mxfp4Matrix, Mxfp4Tensor
from sglang.srt.model_loader.quantized_weights import WeightFormats, pick_weight_formats
from sglang.srt.model_loader.stacked_experts import StackedExpert, alternating
from support.thread_group import thread_groups
from support.tiny_runner import TinyRunner

VOCAB = 71
# Parts of the width of four ranks begin inside of groups of 32.
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    num_local_experts=3,
    num_experts_per_tok=2,
    sliding_window=8,
    max_position_embeddings=64,
    initializer_range=0.2,
    eos_token_id=None,
)
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
EXPERTS = "model.layers.1.mlp.experts"
Tensors = dict[str, torch.Tensor]


def drawn(experts: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(118, 126, blocks.shape[:3], dtype=torch.uint8)


def save(path: Path, config: GptOssConfig | LlamaConfig, change: Callable[[Tensors], None] | None) -> None:
    """change: of the checkpoint's tensors; None saves it with its experts as transformers has them."""
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    stored: Tensors = {}
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = tensors[name].shape
        blocks, scales = drawn(experts, outputs, inputs)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    if change is None:
        save_file(tensors, file, metadata={"format": "pt"})
        return
    file.unlink()
    stored |= {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in stored}
    change(stored)
    where = {}
    for number in (1, 2):
        of_file = {name: tensor for name, tensor in stored.items() if name.endswith("_scales") == (number == 2)}
        save_file(of_file, path / f"model-{number}.safetensors", metadata={"format": "pt"})
        where |= dict.fromkeys(of_file, f"model-{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    set_quantization(path, MXFP4)


def set_quantization(path: Path, config: dict[str, object]) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The one of 4 bits, and what transformers makes of it."""
    paths = [tmp_path_factory.mktemp(name) for name in ("stored", "plain")]
    for path, change in zip(paths, (lambda tensors: None, None)):
        save(path, GptOssConfig(**SHAPE), change)
    return paths


def load(path: Path, group=SINGLE_RANK):
    return load_model(ModelConfig.from_pretrained(str(path)), "auto", TorchNativeAttnBackend(), group=group)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_loaded_is_what_the_numbers_mean(checkpoints, size):
    for group in thread_groups(size) if size > 1 else [SINGLE_RANK]:
        stored, plain = (load(path, group).weight_targets() for path in checkpoints)
        assert stored.keys() == plain.keys() and f"{EXPERTS}.2.up_proj.bias" in stored
        for name, target in plain.items():
            assert torch.equal(stored[name].tensor, target.tensor), name


KEPT = MatrixFormat(E2M1, 32)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_experts_that_keep_their_bits_mean_and_compute_the_same(checkpoints, size):
    """Parts of a rank are whole groups: of three groups two ranks have 2 and 1, and four ranks 1, 1, 1 and none."""
    config, plain = (
        replace(ModelConfig.from_pretrained(str(checkpoints[0])), expert_format=KEPT),
        load(checkpoints[1]),
    )
    theirs, x, num_kept = plain.weight_targets(), torch.randn(9, 64), 0
    # What all ranks' parts mean, put together.
    means = {name: torch.full(target.shape, torch.nan) for name, target in theirs.items() if ".experts." in name}
    models = [load_model(config, "auto", TorchNativeAttnBackend(), group=group) for group in thread_groups(size)]
    for model in models:
        for name, target in model.weight_targets().items():
            if isinstance(target, QuantizedTarget):
                num_kept += 1
                of_rank = target.matrix.dequantized(torch.float32)
                means[name][target.index()] = of_rank.narrow(target.dim, 0, target.num_read)
                assert not of_rank.narrow(
                    target.dim, target.num_read, of_rank.shape[target.dim] - target.num_read
                ).any()
        model.finish_loading()
    assert num_kept == size * 2 * 3 * 3, "gate, up and down of each layer's experts"
    for name, found in means.items():
        if name.endswith("weight"):
            assert torch.equal(found, theirs[name].tensor), name
    plain.finish_loading()
    for layer, of_plain in enumerate(plain.layers):
        weights, chosen = of_plain.mlp.router(x)
        parts = [model.layers[layer].mlp.experts(x, chosen, weights) for model in models]
        assert torch.allclose(sum(parts), of_plain.mlp(x), atol=1e-4)


def test_what_is_beside_it_is_bfloat16_where_the_config_names_no_type(checkpoints, tmp_path):
    raw = json.loads((checkpoints[0] / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):
        raw.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.from_pretrained(str(tmp_path)).dtype == torch.bfloat16
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": None}))
    assert ModelConfig.from_pretrained(str(tmp_path)).dtype == torch.float32


def test_made_up_weights_of_experts_that_keep_their_bits(checkpoints):
    config = replace(ModelConfig.from_pretrained(str(checkpoints[0])), expert_format=KEPT)
    model = load_model(config, "dummy", TorchNativeAttnBackend(), seed=3)
    targets = model.weight_targets().values()
    assert all(drawn_dtype(target, torch.device("cuda")).is_floating_point for target in targets)
    model.finish_loading()
    out = model.layers[0].mlp(torch.randn(5, 64))
    assert bool(out.isfinite().all()) and out.std() > 0.01


@pytest.mark.parametrize(
    ("dtype", "ranks", "experts"),
    [(torch.bfloat16, 1, KEPT), (torch.bfloat16, 4, KEPT), (torch.float16, 1, None), (torch.float32, 1, None)],
)
def test_a_gpu_keeps_the_bits_of_experts_alone(checkpoints, dtype, ranks, experts):
    config = replace(ModelConfig.from_pretrained(str(checkpoints[0])), dtype=dtype)
    # Of made-up weights all are such.
    for names in ((), ("model.layers.0.self_attn.q_proj.weight", f"{EXPERTS}.down_proj_blocks")):
        assert pick_weight_formats(config, names, ranks, torch.device("cuda")) == WeightFormats(None, experts)


def test_logits_are_those_of_transformers(checkpoints):
    theirs = AutoModelForCausalLM.from_pretrained(checkpoints[1])
    tokens = list(range(3, 40))
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0]
    ours = TinyRunner(ModelConfig.from_pretrained(str(checkpoints[0])))
    (seq,) = ours.start([tokens])
    got = ours.forward([(seq, len(tokens))], all_rows=True)
    assert ((got - want).abs().max() / want.std()).item() < 5e-5


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_are_dequantised_on_any_device(checkpoints, device):
    config = ModelConfig.from_pretrained(str(checkpoints[0]))
    stored = config.quantization
    assert stored == WeightQuantization(bits=4, block=(1, 32), packing=Packing.MXFP4) and stored.method == "mxfp4"
    assert with_weight_format(config, "auto", 1, torch.device(device)) == config
    assert config.fingerprint() != ModelConfig.from_pretrained(str(checkpoints[1])).fingerprint()


def test_what_transformers_computes_may_not_be_quantised(checkpoints):
    with pytest.raises(ModelConfigError, match="is quantized, which a model that transformers computes must not be"):
        ModelConfig.from_pretrained(str(checkpoints[0]), model_impl=TRANSFORMERS)


class Slices:
    """A tensor as a slice of an open file."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index):
        return self.tensor[index]


def test_parts_are_codes_and_scales():
    """Of gate and up, whose outputs alternate, too."""
    torch.manual_seed(1)
    blocks, scales = drawn(2, 6, 96)
    scales[1, 2] = torch.tensor([0, 254, 127])
    whole = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    tensor = Mxfp4Tensor("x_proj_blocks", Slices(blocks), scales)
    assert torch.equal(tensor[:], whole) and tensor.get_shape() == [2, 96, 6]
    assert torch.equal(tensor[1:, 7:60, 2:5], whole[1:, 7:60, 2:5])
    expert = tensor.expert(1)
    assert isinstance(expert, Mxfp4Matrix) and torch.equal(expert[2:5, 33:95], whole[1].t()[2:5, 33:95])
    numbers = torch.tensor([*E2M1_VALUES, *(-each for each in E2M1_VALUES)])
    for place, matrix in enumerate(alternating(expert, 2)):
        index = slice(1, 3), slice(32, 96)
        values, factors, zeros = matrix.parts(index, 32)
        assert values.dtype == torch.uint8 and values.shape == (2, 64) and factors.shape == (2, 2) and zeros is None
        want = whole[1].t()[place::2][index]
        assert torch.equal(numbers[values.long()] * factors.repeat_interleave(32, 1), want)
        assert torch.equal(matrix[index], want) and matrix.get_shape() == [3, 96]
    for matrix in alternating(StackedExpert(Slices(whole), 1), 2):
        assert not hasattr(matrix, "parts"), "it would be taken for a quantised one"


def of_scales(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    name = f"{EXPERTS}.down_proj_scales"
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def of_blocks(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    name = f"{EXPERTS}.down_proj_blocks"
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def of_both(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: [each(tensors) for each in (of_blocks(change), of_scales(change))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{EXPERTS}.down_proj_scales"), f"There is no '{EXPERTS}.down_proj_scales' beside"),
        (lambda t: t.pop(f"{EXPERTS}.down_proj_blocks"), f"do not fit .* missing: {EXPERTS}.0.down_proj.weight"),
        (of_scales(lambda each: each[:, :, :2]), r"of the shape \(3, 64, 2\), and .* uint8 of \(3, 64, 3\)"),
        (of_scales(lambda each: each.float()), r"are float32 of the shape \(3, 64, 3\)"),
        (of_blocks(lambda each: each.flatten(2)), r"has the shape \(3, 64, 48\), and blocks of mxfp4 are uint8"),
        (of_blocks(lambda each: each[..., :8]), r"has the shape \(3, 64, 3, 8\), and blocks of mxfp4"),
        (of_both(lambda each: each[:2].clone()), r"down_proj' has the shape \(2, 96, 64\), but .* \(3, 96, 64\)"),
        (of_both(lambda each: each[:, :32].clone()), r"has the shape \(3, 96, 32\), but .* asks for \(3, 96, 64\)"),
        (of_scales(lambda each: each.fill_(255)), f"NaN or infinite numbers, .*: {EXPERTS}.down_proj"),
        (lambda t: t.update({f"{EXPERTS}.down_proj_bias": torch.ones(3, 65)}), r"_bias' has the shape \(3, 65\)"),
        (lambda t: t.update({f"{EXPERTS}.down_proj": torch.ones(1)}), "down_proj' and .*_blocks' hold the same"),
        (lambda t: t.update({"model.layers.1.x_proj_scales": torch.ones(1)}), "unexpected: model.layers.1.x_proj_"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64).long()}), "norm.weight' is of the type I64"),
        (lambda t: t.update({"lm_head.qweight": t.pop("lm_head.weight")}), "'lm_head.qweight' holds packed numbers"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(tmp_path, change, message):
    save(tmp_path, GptOssConfig(**SHAPE), change)
    config = ModelConfig.from_pretrained(str(tmp_path))
    for each in (config, replace(config, expert_format=KEPT)):
        with pytest.raises(ModelLoadError, match=message):
            load_model(each, "auto", TorchNativeAttnBackend())


def test_blocks_of_which_the_config_tells_nothing(tmp_path):
    save(tmp_path, GptOssConfig(**SHAPE), lambda tensors: None)
    set_quantization(tmp_path, {"quant_method": "fp8"})
    with pytest.raises(
        ModelLoadError, match=r"_proj_blocks' holds packed numbers, of which config.json tells nothing"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(hidden_size=64), "'mxfp4', which is read of GptOssForCausalLM and not of LlamaForCausalLM"),
        (GptOssConfig(**SHAPE | {"hidden_size": 80}), "hidden_size in its config is 80, and .* a multiple of 32"),
        (GptOssConfig(**SHAPE | {"intermediate_size": 100}), "intermediate_size in its config is 100, and mxfp4"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be(tmp_path, config, message):
    config.architectures = [{"llama": "LlamaForCausalLM"}.get(config.model_type, "GptOssForCausalLM")]
    config.save_pretrained(tmp_path)
    set_quantization(tmp_path, MXFP4)
    with pytest.raises(ModelConfigError, match=f"cannot be served: .*{message}"):
        ModelConfig.from_pretrained(str(tmp_path))


def test_the_least_and_the_largest_scale():
    """2 ** -127 is no normal float32. What a byte of 255 means is no number."""
    blocks = torch.full((1, 1, 1, 16), 0x21, dtype=torch.uint8)
    for byte in (0, 1, 127, 254, 255):
        found = Mxfp4Tensor("x", Slices(blocks), torch.full((1, 1, 1), byte, dtype=torch.uint8))[:].flatten()
        if byte == 255:
            assert bool(found.isnan().all())
        else:
            assert found[:2].tolist() == [0.5 * math.ldexp(1, byte - 127), math.ldexp(1, byte - 127)], byte
