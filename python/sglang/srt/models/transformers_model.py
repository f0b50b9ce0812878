"""`TransformersForCausalLM`: any causal language model of transformers as a `CausalLM`, by its own modelling code.

Owns the model and what was found out about its layers. transformers calls `attend` here through its
`AttentionInterface`: the function stores K and V in the pool and attends over the batch's segments. No cache of
transformers is used and no mask is built. The whole forward pass runs in the call of the last layer, when the gates
of all layers are open, because transformers cannot be called layer by layer in general.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_files import ModelConfigError
from sglang.srt.distributed.parallel_state import TensorParallelGroup
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.masked_attention import masked_attention
from sglang.srt.layers.kv_scale import KVScale, kv_scale_of
from sglang.srt.mem_cache.kv_view import KVPool, KVSegment, KVView
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.utils.device import to_device

# The name of our attention in transformers.
PAGED = "sglang_paged"
# Arguments of attention that are honoured, or that change nothing without a cache of transformers.
_HONOURED = {"scaling", "dropout", "sliding_window", "softcap", "s_aux"}
_NO_EFFECT = {
    *("position_ids", "position_embeddings", "cache_position", "use_cache", "past_key_values", "logits_to_keep"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "is_causal"),
}

# Of the largest value: keys that differ by less are the same but for rounding.
_SAME = 0.02

# What attention does in the current thread: serve a batch, or find out about the model.
_Attend = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, Any, dict[str, Any]], torch.Tensor]
_attend: ContextVar[_Attend] = ContextVar("attend")
# The masks that transformers wants to build while a model is inspected; None while it serves.
_masks: ContextVar[list[tuple[torch.Tensor, Callable[..., torch.Tensor]]] | None] = ContextVar("masks", default=None)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query, key, value: (1, num_heads, num_tokens, head_dim). Returns (1, num_tokens, num_heads, head_dim)."""
    return _attend.get()(module, query, key, value, attention_mask, kwargs), None


def _mask(mask_function: Callable[..., torch.Tensor], **kwargs: Any) -> torch.Tensor | None:
    wanted = _masks.get()
    if wanted is None:
        return None
    # A stand-in, to be recognised where it arrives.
    stand_in = torch.zeros(1, 1, 1, 1)
    wanted.append((stand_in, mask_function))
    return stand_in


AttentionInterface.register(PAGED, _attention)
AttentionMaskInterface.register(PAGED, _mask)


@contextmanager
def _using(attend: _Attend) -> Iterator[None]:
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


@contextmanager
def _last_hidden(model: Any) -> Iterator[list[torch.Tensor]]:
    """Gets what the decoder passes to the head, (1, num_tokens, hidden_size), by each call in here."""
    found: list[torch.Tensor] = []
    hook = model.base_model.register_forward_hook(lambda _, args, output: found.append(output[0]))
    try:
        yield found
    finally:
        hook.remove()


class TransformersForCausalLM(nn.Module):
    """See `CausalLM`. model: of transformers, with the attention `PAGED`; None makes one with weights at random."""

    def __init__(
        self,
        config: ModelConfig,
        attn_backend: AttentionBackend,
        group: TensorParallelGroup,
        model: Any = None,
    ) -> None:
        super().__init__()
        config.check_tensor_parallel(group.size)
        if model is None:
            model = AutoModelForCausalLM.from_config(
                config.hf_config, dtype=config.dtype, attn_implementation=PAGED, trust_remote_code=False
            )
        self.model = model.requires_grad_(False)
        self.config = config
        self.num_layers = config.num_layers
        self.backend = attn_backend
        # Of each layer, the tokens that a query sees; None for all.
        self.windows: list[int | None] = [None] * config.num_layers
        # Of each layer, once they are on its device.
        self.kv_scales: list[KVScale] = []

    def finish_loading(self) -> None:
        """Its layers are torch's own: there is nothing to pack."""

    @torch.inference_mode()
    def inspect_layers(self, device: torch.device) -> None:
        """Find the windows, and that every layer is one that paged attention can compute: by forward passes of two
        tokens without attention. device: the model's, which gets the KV scales. Raises ModelConfigError."""
        with device:
            scales, heads = self.config.kv_scales, self.config.num_kv_heads
            self.kv_scales = [kv_scale_of(scales, 0, layer, heads) for layer in range(self.num_layers)]
        found, counted = _Inspection(self.config), _Inspection(self.config)
        tokens, positions, last = (to_device(np.array(each), device) for each in ([3, 2], [0, 1], [1]))
        token = _masks.set(found.masks)
        try:
            with _using(found.attend):
                logits = self._forward(tokens, positions, last)
            with _using(counted.attend):
                self._forward(tokens, None, last)
        except ModelConfigError:
            raise
        except Exception as error:
            raise found.refusal(f"its modelling code fails without a cache of transformers ({error!r})") from error
        finally:
            _masks.reset(token)
        self.windows = found.windows()
        if logits.shape[-1] != self.config.vocab_size:
            raise found.refusal(f"it has {logits.shape[-1]} logits, and a vocabulary of {self.config.vocab_size}")
        for call, same in zip(found.calls, counted.calls):
            if (call.keys - same.keys).abs().max() > _SAME * call.keys.abs().max():
                raise found.refusal("the positions of its tokens are not 0, 1, 2, as its own code counts them")

    def embed(self, batch: ForwardBatch) -> None:
        return None

    @torch.inference_mode()
    def forward_layer(
        self, layer_id: int, state: torch.Tensor | None, batch: ForwardBatch, pool: KVPool
    ) -> torch.Tensor | None:
        """Nothing before the last layer, whose call returns the logits of batch.sample_rows."""
        if layer_id < self.num_layers - 1:
            return None
        with _using(_Serving(self, batch, pool).attend):
            if not batch.wants_hidden:
                return self._forward(batch.input_ids, batch.positions, batch.sample_rows)
            with _last_hidden(self.model) as hidden:
                logits = self._forward(batch.input_ids, batch.positions, batch.sample_rows)
            batch.hidden = hidden[0][0, batch.sample_rows]
            return logits

    def begin_layer(self, layer_id: int, state: Any, batch: ForwardBatch, pool: KVPool) -> Any:
        raise AssertionError("--layer-stream is refused at the start")

    def attend(
        self, layer_id: int, state: Any, batch: ForwardBatch, place: int, view: KVView, segment: KVSegment
    ) -> Any:
        raise AssertionError("--layer-stream is refused at the start")

    def end_layer(self, layer_id: int, state: Any, batch: ForwardBatch) -> Any:
        raise AssertionError("--layer-stream is refused at the start")

    def logits(self, state: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return state

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        """(num_tokens,) int64 each, and the rows whose logits are wanted. positions: None lets the model count them.
        Returns (num_rows, vocab_size) float32."""
        out = self.model(
            input_ids=input_ids[None],
            position_ids=None if positions is None else positions[None],
            use_cache=False,
            logits_to_keep=rows,
        )
        return out.logits[0].float()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Serving:
    """The attention of one batch."""

    model: TransformersForCausalLM
    batch: ForwardBatch
    pool: KVPool

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        layer, batch, config = _layer_of(module), self.batch, self.model.config
        head_dim, value_dim = config.head_dim, value.shape[-1]
        q, k, v = (x[0].transpose(0, 1).to(config.dtype).contiguous() for x in (query, key, value))
        if value_dim < head_dim:
            v = pad(v, (0, head_dim - value_dim))
        kv_scale = self.model.kv_scales[layer]
        self.pool.store(layer, batch.out_loc, *kv_scale.stored(k, v))
        scale = kwargs.get("scaling")
        meta = replace(batch.attn, scale=head_dim**-0.5 if scale is None else float(scale))
        q, meta = kv_scale.scored(q, meta)
        meta = replace(meta, window=self._window(layer), softcap=kwargs.get("softcap"), sinks=kwargs.get("s_aux"))
        backend = self.model.backend
        attend = backend.forward if meta.is_ordinary or backend.computes_masked else masked_attention
        out = attend(q, self.pool.view(layer), batch.segments, meta)
        return kv_scale.loaded(out)[None, ..., :value_dim].to(query.dtype)

    def _window(self, layer: int) -> int | None:
        """None where it hides nothing, as no request is longer. A backend that computes windows always gets it:
        without one it would compile another kernel while it serves."""
        window = self.model.windows[layer]
        is_needed = window is not None and (self.model.backend.computes_masked or self._longest > window)
        return window if is_needed else None

    @cached_property
    def _longest(self) -> int:
        """Tokens of the batch's longest request."""
        return max(sum(segment.length for segment in of_req) for of_req in self.batch.segments)


@dataclass
class _Call:
    """One call of attention, for the facts that `_Inspection` looks at."""

    layer: int
    mask: Any
    # (num_kv_heads, 2, head_dim) float32.
    keys: torch.Tensor


@dataclass
class _Inspection:
    """Records what a model asks of attention, and refuses what is not served."""

    config: ModelConfig
    masks: list[tuple[torch.Tensor, Callable[..., torch.Tensor]]] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)

    def refusal(self, reason: str) -> ModelConfigError:
        return ModelConfigError(
            f"{self.config.model_path!r} ({self.config.architecture}) cannot be served: {reason}."
        )

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        config = self.config
        shapes = (tuple(query.shape), tuple(key.shape))
        wanted = ((1, config.num_heads, 2, config.head_dim), (1, config.num_kv_heads, 2, config.head_dim))
        if shapes != wanted or value.shape[:3] != key.shape[:3] or value.shape[3] > config.head_dim:
            raise self.refusal(
                f"a layer has queries and keys of the shapes {shapes}, and its config asks for {wanted} in every "
                "layer"
            )
        unknown = [
            name
            for name, given in kwargs.items()
            if name not in _HONOURED | _NO_EFFECT and given is not None and given is not False
        ]
        if unknown or kwargs.get("dropout") or kwargs.get("is_causal") is False:
            raise self.refusal(
                f"its attention takes {', '.join(unknown) or 'dropout or the future'}, which paged attention does not"
            )
        self.calls.append(_Call(_layer_of(module), mask, key[0].float()))
        return torch.zeros_like(query.transpose(1, 2))[..., : value.shape[-1]]

    def windows(self) -> list[int | None]:
        """Of each layer."""
        layers = [call.layer for call in self.calls]
        if sorted(layers) != list(range(self.config.num_layers)):
            raise self.refusal(
                f"its layers {layers} attend, and layers 0 to {self.config.num_layers - 1} have to, each once"
            )
        functions = {id(stand_in): function for stand_in, function in self.masks}
        found: list[int | None] = [None] * self.config.num_layers
        for call in self.calls:
            if id(call.mask) not in functions:
                raise self.refusal("it makes its attention masks by itself")
            found[call.layer] = self._window_of(functions[id(call.mask)])
        return found

    def _window_of(self, function: Callable[..., torch.Tensor]) -> int | None:
        """The number of tokens that a query sees according to a mask; None for all before it."""
        last = self.config.context_length - 1
        keys = torch.arange(last + 2)
        zero = torch.tensor(0)
        windows = set()
        for query in (last, last - 1, last // 2):
            seen = function(zero, zero, torch.tensor(query), keys).expand(keys.shape)
            number = int(seen.sum())
            if not 0 < number <= query + 1 or not bool(seen[query + 1 - number : query + 1].all()):
                raise self.refusal("a token of it sees other tokens than itself and the ones before")
            windows.add(None if number == query + 1 else number)
        if len(windows) == 2 and None in windows:
            # Only the shorter sequences fit the window.
            windows.discard(None)
        if len(windows) > 1:
            raise self.refusal("its attention sees chunks of the text; only full attention and sliding windows are")
        return windows.pop()


def _layer_of(module: nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    assert isinstance(layer, int), f"{type(module).__name__} does not tell its layer"
    return layer
