"""`Costs`: what one token costs, by a model's checkpoint, a live server, or the user's word.

Layers with a sliding window see the end of a prompt alone. Tiers keep them for some of the tokens, see
kept_windows.py, and loads bring them for the end of what is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang.cli.kept_windows import kept_share
from sglang.cli.reuse import ReferenceLog
from sglang.cli.server import CommandError, check_number, number_in

# Bounds of what is given: beyond them is a mistake, and its advice would be no number that can be read.
LEAST = 0.001
MOST = 1e12


@dataclass(frozen=True)
class WindowedLayers:
    """Those of a model with a sliding window, where other layers have none. Shares are of tokens."""

    # Of a token, in these layers.
    bytes_per_token: float
    # For which they are kept, on the device and below.
    device_share: float
    share: float
    # Of what is found, for which they are loaded.
    loaded_share: float


@dataclass(frozen=True)
class Costs:
    """What one token costs. bytes_per_token: of all layers. prefill_tokens_per_s: how fast prompts are computed."""

    bytes_per_token: float
    prefill_tokens_per_s: float
    windowed: WindowedLayers | None = None

    def bytes_held(self, tier: str) -> float:
        """Per token, on average."""
        if self.windowed is None:
            return self.bytes_per_token
        share = self.windowed.device_share if tier == "device" else self.windowed.share
        return self.bytes_per_token - (1 - share) * self.windowed.bytes_per_token

    @property
    def bytes_loaded(self) -> float:
        """Per token that is found, on average."""
        if self.windowed is None:
            return self.bytes_per_token
        return self.bytes_per_token - (1 - self.windowed.loaded_share) * self.windowed.bytes_per_token

    @property
    def pays_above(self) -> float:
        """Bytes per second of a link that brings a token as fast as it is computed."""
        return self.bytes_loaded * self.prefill_tokens_per_s


@dataclass(frozen=True)
class _TokenBytes:
    """Of a token's KV."""

    all_layers: float
    # Of layers with a window.
    windowed: float = 0.0
    # How many tokens before the first new one these see.
    window_reach: int = 0
    # Of the device's tokens, those that have these layers.
    device_share: float = 1.0
    # Whether the tiers below keep these layers for some tokens alone.
    is_divided_below: bool = True


@dataclass(frozen=True)
class Given:
    """What the user has told; None: nothing."""

    bytes_per_token: float | None = None
    prefill_tokens_per_s: float | None = None
    model_path: str | None = None
    kv_cache_dtype: str = "auto"


def find_costs(given: Given, state: Mapping[str, Any], log: ReferenceLog) -> Costs:
    """state: of a server; empty without one. Raises CommandError."""
    mean_prompt = log.prompt_tokens / max(1, log.num_requests)
    speed = given.prefill_tokens_per_s
    found: _TokenBytes | None = None
    if given.bytes_per_token is not None:
        found = _TokenBytes(given.bytes_per_token)
    elif given.model_path is not None:
        found = _bytes_of_model(given.model_path, given.kv_cache_dtype)
        if state:
            # The server's pool may be divided otherwise.
            found = replace(found, device_share=_device_share(state))
    elif state:
        found = _bytes_of_server(state)
    if speed is None and state:
        # Each new token attends to half of the prompt, on average.
        token_s = number_in(state, "costs", "token_s") + number_in(state, "costs", "pair_s") * mean_prompt / 2
        if token_s > 0:
            speed = 1 / token_s
    if found is None:
        raise CommandError("how much KV has a token? Give --bytes-per-token or --model-path")
    if speed is None:
        known = "the server has not measured it yet" if state else "a trace does not tell"
        raise CommandError(f"how fast are prompts computed ({known})? Give --prefill-tokens-per-s")
    for name, value in (("--bytes-per-token", found.all_layers), ("--prefill-tokens-per-s", speed)):
        check_number(name, value, LEAST, MOST)
    windowed = None
    if found.window_reach:
        windowed = WindowedLayers(
            found.windowed,
            found.device_share,
            kept_share(log, found.window_reach) if found.is_divided_below else 1.0,
            min(1.0, found.window_reach / max(1.0, mean_prompt)),
        )
    return Costs(float(found.all_layers), float(speed), windowed)


def _bytes_of_server(state: Mapping[str, Any]) -> _TokenBytes:
    page_bytes, page_size = number_in(state, "page_bytes"), number_in(state, "page_size", least=1)
    all_layers = page_bytes / page_size
    # Other servers may lack these.
    if not state.get("window_reach"):
        return _TokenBytes(all_layers)
    return _TokenBytes(
        all_layers,
        number_in(state, "windowed_page_bytes") / page_size,
        int(number_in(state, "window_reach")),
        _device_share(state),
        # A host that is to be there would be.
        not _has_tier(state, "host") or _is_divided(state, "host"),
    )


def _device_share(state: Mapping[str, Any]) -> float:
    """Of the device's tokens, those for which it has layers with a window."""
    if not _is_divided(state, "device"):
        return 1.0
    windowed = number_in(state, "tiers", "device", "windowed", "total_tokens")
    return windowed / number_in(state, "tiers", "device", "total_tokens", least=1)


def _has_tier(state: Mapping[str, Any], tier: str) -> bool:
    tiers = state.get("tiers")
    return isinstance(tiers, Mapping) and isinstance(tiers.get(tier), Mapping)


def _is_divided(state: Mapping[str, Any], tier: str) -> bool:
    """Whether layers with a window have a pool of their own there."""
    return _has_tier(state, tier) and "windowed" in state["tiers"][tier]


def _bytes_of_model(model_path: str, kv_cache_dtype: str) -> _TokenBytes:
    # These import torch and transformers.
    from sglang.srt.configs.kv_cache_dtype import KV_CACHE_DTYPE_CHOICES, pick_kv_cache_dtype
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.model_files import ModelConfigError
    from sglang.srt.managers.startup.device import page_layout
    from sglang.srt.managers.startup.sizes import usual_windowed_share, window_reach_of

    if kv_cache_dtype not in KV_CACHE_DTYPE_CHOICES:
        raise CommandError(f"--kv-cache-dtype {kv_cache_dtype} is none of {', '.join(KV_CACHE_DTYPE_CHOICES)}")
    try:
        config = ModelConfig.from_pretrained(model_path)
    except (ModelConfigError, OSError) as error:
        raise CommandError(f"--model-path {model_path} cannot be read: {error}") from None
    config = replace(config, kv_cache_dtype=pick_kv_cache_dtype(kv_cache_dtype))
    all_layers = float(page_layout(config, page_size=1, num_ranks=1).page_bytes)
    reach = window_reach_of(config.windows)
    num_windowed = sum(window is not None for window in config.windows)
    if not num_windowed or reach >= config.context_length:
        return _TokenBytes(all_layers)
    windowed = all_layers * num_windowed / config.num_layers
    if num_windowed == config.num_layers:
        return _TokenBytes(all_layers, windowed, reach, is_divided_below=False)
    return _TokenBytes(all_layers, windowed, reach, usual_windowed_share(reach))
