"""`TransformersForCausalLM`: any causal language model of transformers as a `CausalLM`, by its own modelling code.

Owns the model and what was found out about its layers. transformers calls `_attention` through its
`AttentionInterface`; K and V go to the pool, and attention reads the batch's segments. No cache of transformers is
used and no mask is built.

transformers cannot be called layer by layer, but its forward pass can be stopped wherever a layer attends: it runs in
a greenlet. So what a layer here computes is from its attention to the next one's:

    embed              | embeddings, layer 0: norm, projections |
    forward_layer 0                                             | attention 0, MLP | layer 1: norm, projections |
    forward_layer 1                                                                                             | ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from greenlet import getcurrent, greenlet
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_files import ModelConfigError
from sglang.srt.distributed.parallel_state import TensorParallelGroup
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.kv_scale import kv_scale_of
from sglang.srt.layers.latent_projections import LatentProjections
from sglang.srt.layers.radix_attention import RadixAttention, StreamedAttention
from sglang.srt.mem_cache.kv_view import KVPool, KVSegment, KVView
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.transformers_latents import keep_latents
from sglang.srt.models.transformers_ranks import OwnHeads, divide_layers
from sglang.srt.utils.device import to_device

# The names of our attention in transformers. It builds masks for one that is registered for them, and first asks the
# device in each pass whether positions begin anew: it waits for all passes before.
PAGED = "sglang_paged"
PAGED_WITH_MASKS = "sglang_paged_with_masks"
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
# The masks that transformers wants to build while a model is inspected.
_masks: ContextVar[list[tuple[torch.Tensor, Callable[..., torch.Tensor]]]] = ContextVar("masks")


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


def _mask(mask_function: Callable[..., torch.Tensor], **kwargs: Any) -> torch.Tensor:
    # A stand-in, to be recognised where it arrives.
    stand_in = torch.zeros(1, 1, 1, 1)
    _masks.get().append((stand_in, mask_function))
    return stand_in


AttentionInterface.register(PAGED, _attention)
AttentionInterface.register(PAGED_WITH_MASKS, _attention)
AttentionMaskInterface.register(PAGED_WITH_MASKS, _mask)


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


@dataclass(frozen=True)
class _Asked:
    """The attention that a layer asks for, in the words of `_attention`."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kwargs: dict[str, Any]


class _ForwardPass:
    """The forward pass of a batch, which stops wherever a layer attends, until it is given the result. On one thread.
    Nothing on its stack refers to it: one that does not come to its end is unwound with its last reference, and on
    another thread than its own once that one runs the next pass."""

    def __init__(self, forward: Callable[[], torch.Tensor]) -> None:
        self._greenlet = greenlet(_run)
        self._forward = forward
        # None before the pass has begun, and at its end.
        self.asked: _Asked | None = None
        # At its end.
        self.logits: torch.Tensor | None = None
        # Within a layer: (num_tokens, num_heads, head_dim), and that of requests that stream.
        self.attended: torch.Tensor | None = None
        self.streamed: StreamedAttention | None = None

    def begin(self) -> None:
        """Goes on to the first attention."""
        self._go_on(self._forward)

    def resume(self, attended: torch.Tensor) -> None:
        """Goes on to the next attention, or to the end. attended: (num_tokens, num_heads, head_dim), the result of
        what was asked for."""
        assert self.asked is not None
        self._go_on(attended[None].to(self.asked.query.dtype))

    def _go_on(self, given: Any) -> None:
        found = self._greenlet.switch(given)
        self.asked, self.logits = (None, found) if self._greenlet.dead else (found, None)


def _run(forward: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The greenlet of a pass."""
    with _using(_ask):
        return forward()


def _ask(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    caller = getcurrent().parent
    assert caller is not None
    found: torch.Tensor = caller.switch(_Asked(_layer_of(module), query, key, value, kwargs))
    return found


class TransformersForCausalLM(nn.Module):
    """See `CausalLM`. model: of transformers, with the attention `PAGED_WITH_MASKS`; None makes one with weights at
    random."""

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
                config.hf_config, dtype=config.dtype, attn_implementation=PAGED_WITH_MASKS, trust_remote_code=False
            )
        self.model = model.requires_grad_(False)
        self.config = config
        self.heads = divide_layers(self.model, config, group)
        self.num_layers = config.num_layers
        self.backend = attn_backend
        # Known once the layers were inspected, as is the attention of each.
        self.windows: list[int | None] = [None] * config.num_layers
        self.attention: list[RadixAttention] = []
        # Of each layer with latent attention.
        self.projections: list[LatentProjections] = []

    def finish_loading(self) -> None:
        """Its layers are torch's own: there is nothing to pack."""

    @torch.inference_mode()
    def inspect_layers(self, device: torch.device) -> None:
        """Find the windows, and that every layer is one that paged attention can compute: by forward passes of two
        tokens without attention, of this rank alone. device: the model's, which gets the KV scales. Raises
        ModelConfigError."""
        if self.config.latent is not None:
            self.projections = keep_latents(self.model, self.config, self.heads)
        found, counted = (_Inspection(self.config, self.heads) for _ in range(2))
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
            what = f"its modelling code fails without a cache of transformers ({error!r}){found.hint}"
            raise found.refusal(what) from error
        finally:
            _masks.reset(token)
        self.model.set_attn_implementation(PAGED)
        self.windows = found.windows()
        latent = self.config.latent
        with device:
            scales, rank, kv_heads = self.config.kv_scales, self.heads.group.rank, self.heads.kv.size
            self.attention = [
                RadixAttention(
                    layer,
                    self.backend,
                    kv_scale_of(scales, rank, layer, kv_heads, latent is not None),
                    self.windows[layer],
                    None if latent is None else latent.rank,
                )
                for layer in range(self.num_layers)
            ]
        if logits.shape[-1] != self.config.vocab_size:
            raise found.refusal(f"it has {logits.shape[-1]} logits, and a vocabulary of {self.config.vocab_size}")
        for call, same in zip(found.calls, counted.calls):
            if (call.keys - same.keys).abs().max() > _SAME * call.keys.abs().max():
                raise found.refusal("the positions of its tokens are not 0, 1, 2, as its own code counts them")
        self.heads.join()

    @torch.inference_mode()
    def embed(self, batch: ForwardBatch) -> _ForwardPass:
        state = _ForwardPass(partial(self._forward_batch, batch))
        state.begin()
        return state

    def forward_layer(self, layer_id: int, state: _ForwardPass, batch: ForwardBatch, pool: KVPool) -> _ForwardPass:
        return self.end_layer(layer_id, self.begin_layer(layer_id, state, batch, pool), batch)

    @torch.inference_mode()
    def begin_layer(self, layer_id: int, state: _ForwardPass, batch: ForwardBatch, pool: KVPool) -> _ForwardPass:
        asked, attention, head_dim = state.asked, self.attention[layer_id], self.config.head_dim
        assert asked is not None and asked.layer == layer_id, f"{asked} attends in place of layer {layer_id}"
        heads = self.heads
        shards = (asked.query, heads.query), (asked.key, heads.kv), (asked.value, heads.kv)
        q, k, v = (heads.of(x[0], shard, 0).transpose(0, 1).to(self.config.dtype).contiguous() for x, shard in shards)
        if self.projections:
            projections = self.projections[layer_id]
            of_latents, rotated = q.split((projections.config.key_dim, projections.config.rotary_dim), dim=2)
            q = torch.cat((projections.queries(of_latents), rotated), dim=2)
            attention.store_latents(k, batch.out_loc.unbind(), pool)
        else:
            if v.shape[-1] < head_dim:
                v = pad(v, (0, head_dim - v.shape[-1]))
            attention.store(k, v, batch.out_loc.unbind(), pool)
        scale, sinks = asked.kwargs.get("scaling"), asked.kwargs.get("s_aux")
        attn = replace(
            batch.attn,
            scale=head_dim**-0.5 if scale is None else float(scale),
            softcap=asked.kwargs.get("softcap"),
            sinks=None if sinks is None else heads.of(sinks, heads.query, 0),
        )
        state.attended = attention(q, replace(batch, attn=attn), pool)
        if batch.streamed:
            state.streamed = StreamedAttention(attention, q, attn, batch.streamed, pool)
        return state

    @torch.inference_mode()
    def attend(
        self,
        layer_id: int,
        state: _ForwardPass,
        batch: ForwardBatch,
        place: int,
        view: KVView,
        segment: KVSegment,
        position: int,
    ) -> _ForwardPass:
        assert state.streamed is not None
        state.streamed.attend(place, view, segment, position)
        return state

    @torch.inference_mode()
    def end_layer(self, layer_id: int, state: _ForwardPass, batch: ForwardBatch) -> _ForwardPass:
        assert state.attended is not None
        if state.streamed is not None:
            state.streamed.write_to(state.attended)
        if self.projections:
            values = self.projections[layer_id].values(state.attended)
        else:
            assert state.asked is not None
            values = state.attended[..., : state.asked.value.shape[-1]]
        state.resume(self.heads.results(layer_id, values))
        return state

    def logits(self, state: _ForwardPass, batch: ForwardBatch) -> torch.Tensor:
        assert state.logits is not None, "a layer is left"
        return state.logits

    def _forward_batch(self, batch: ForwardBatch) -> torch.Tensor:
        if not batch.wants_hidden:
            return self._forward(batch.input_ids, batch.positions, batch.sample_rows)
        with _last_hidden(self.model) as hidden:
            logits = self._forward(batch.input_ids, batch.positions, batch.sample_rows)
        batch.hidden = hidden[0][0, batch.sample_rows]
        return logits

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
    heads: OwnHeads
    masks: list[tuple[torch.Tensor, Callable[..., torch.Tensor]]] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)

    def refusal(self, reason: str) -> ModelConfigError:
        return ModelConfigError(
            f"{self.config.model_path!r} ({self.config.architecture}) cannot be served: {reason}."
        )

    @property
    def hint(self) -> str:
        """For what may be wrong with a rank's part alone."""
        num_ranks = self.heads.group.size
        return f", divided over {num_ranks} ranks: choose --tp-size 1" if num_ranks > 1 else ""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        config, heads = self.config, self.heads
        shapes = (tuple(query.shape), tuple(key.shape))
        latent, value_dim = config.latent, value.shape[3]
        query_dim = config.head_dim if latent is None else latent.key_dim + latent.rotary_dim
        wanted = ((1, config.num_heads, 2, query_dim), (1, config.num_kv_heads, 2, config.head_dim))
        fits = all(
            shape in (whole, (1, shard.size, *whole[2:]))
            for shape, whole, shard in zip(shapes, wanted, (heads.query, heads.kv))
        )
        if not fits or value.shape[:3] != key.shape[:3] or value_dim > config.head_dim:
            raise self.refusal(
                f"a layer has queries and keys of the shapes {shapes}, and its config asks for {wanted} in every "
                f"layer{self.hint}"
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
        layer = _layer_of(module)
        self.calls.append(_Call(layer, mask, key[0].float()))
        return query.new_zeros(1, 2, heads.num_results(layer), value_dim if latent is None else latent.value_dim)

    def windows(self) -> list[int | None]:
        """Of each layer."""
        layers = [call.layer for call in self.calls]
        if layers != list(range(self.config.num_layers)):
            raise self.refusal(
                f"its layers {layers} attend, and layers 0 to {self.config.num_layers - 1} have to, in order, each "
                "once"
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
