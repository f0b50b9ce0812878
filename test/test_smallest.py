"""The smallest end-to-end test: the embedded model answers, and answers the same from its cache. For `make check`."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from support.local_engine import LocalEngine


def test_one_prompt_twice() -> None:
    engine = LocalEngine(ModelConfig.from_pretrained("embedded"), num_device_pages=256, num_host_pages=256)
    prompt = list(range(10, 60))
    (cold,), (warm,) = engine.generate([prompt]), engine.generate([prompt])
    assert cold.tokens == warm.tokens and len(cold.tokens) == 16
    assert cold.cached_tokens_details["device"] == 0
    assert warm.cached_tokens_details["device"] == 49
    engine.close()
