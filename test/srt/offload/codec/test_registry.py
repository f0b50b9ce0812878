"""Settings to codecs."""

from __future__ import annotations

import pytest

from sglang.srt.offload.codec import make_codec
from support.codec_cases import CONFIGS, SMALL, kv_block


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        ({}, "lossless-v1 coder=zstd level=0"),
        ({"codec": "lossless", "coder": "deflate", "level": 2}, "lossless-v1 coder=deflate level=2"),
        ({"codec": "binned"}, "binned-v1 k=3x255 v=3x255 coder=deflate level=0"),
        (
            {"codec": "binned", "k_bins": [[1, 32], [None, 16]], "v_bins": 7},
            "binned-v1 k=1x32,2x16 v=3x7 coder=deflate level=0",
        ),
        ({"codec": "binned", "k_bins": [[1, 9], [2, 9]]}, "binned-v1 k=3x9 v=3x255 coder=deflate level=0"),
        ({"codec": "raw"}, "raw-v1"),
    ],
)
def test_the_spec_names_every_setting(config, spec: str):
    assert make_codec(config, SMALL).spec == spec


def test_cachegen_is_32_bins_in_the_first_10_of_32_layers_of_k_and_2_of_v():
    layout = kv_block(1, 32, 1, 8, 128, "bfloat16")
    assert make_codec({"codec": "binned", "bins": "cachegen"}, layout).spec.startswith(
        "binned-v1 k=10x32,22x16 v=2x32,30x16 "
    )


def test_only_binned_is_lossy():
    for name, config in CONFIGS.items():
        assert make_codec(config, SMALL).lossy == name.startswith("binned")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"codec": "zip"}, "use one of lossless, binned, raw"),
        ({"codec": ["raw"]}, "use one of lossless, binned, raw"),
        ({"codec": "lossless", "bins": 16}, "its options are coder, level"),
        ({"codec": "raw", "level": 1}, "its options are none"),
        ({"coder": "lz4"}, "it has to be one of zstd, deflate"),
        ({"level": 99}, "0 .entropy only. or 1 to 19"),
        ({"level": "fast"}, "it has to be a whole number"),
        ({"level": True}, "it has to be a whole number"),
        ({"codec": "binned", "level": 9}, "1 to 3"),
        ({"codec": "binned", "bins": 2}, "use 3 to 255"),
        ({"codec": "binned", "bins": 256}, "use 3 to 255"),
        ({"codec": "binned", "bins": "many"}, "it has to be a number of bins, or runs like"),
        ({"codec": "binned", "k_bins": []}, "it has to be a number of bins, or runs like"),
        ({"codec": "binned", "k_bins": [[None, 16], [1, 32]]}, "it has to be a number of bins, or runs like"),
        ({"codec": "binned", "k_bins": [[-1, 16], [None, 32]]}, "it has to be a number of bins, or runs like"),
        ({"codec": "binned", "k_bins": [[1, 16.5], [None, 32]]}, "it has to be a number of bins, or runs like"),
        ({"codec": "binned", "k_bins": [[1, 16]]}, "the model has 3"),
        ({"codec": "binned", "k_bins": [[9, 16], [None, 16]]}, "the model has 3"),
        ({"codec": "binned", "bins": 16, "k_bins": 32}, "either bins, or k_bins and v_bins"),
    ],
)
def test_bad_settings_say_what_to_do(config, says: str):
    with pytest.raises(ValueError, match=says):
        make_codec(config, SMALL)
