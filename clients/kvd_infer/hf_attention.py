"""The attention implementation "kvd": that of a KvdCache, which attends itself, else "sdpa"."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface, AttentionMaskInterface

from kvd_client import Unsupported

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvd_infer.hf_cache import KvdCache

NAME = "kvd"

# What an attention layer may ask for and `attend` does not do.
_UNKNOWN_TO_ATTEND = ("softcap", "s_aux", "position_bias")

_NO_MASKS = (
    "a KvdCache takes no padding and no mask of one's own: pass one prompt without padding, and "
    "either no attention_mask or one of ones over cached and new tokens"
)


class Unmasked(int):
    """The offset of keys that a cache tells in `get_mask_sizes` if it attends itself.

    No mask is made for it: it knows what each query sees. Padding is refused.
    """


# The cache whose `update` was called last in this thread; the attention function is called next.
# Up to 5.23 transformers has no other way from the one to the other.
current_cache: ContextVar[KvdCache | None] = ContextVar("kvd_cache", default=None)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a cache that attends itself; every other call is transformers' sdpa.

    A call belongs to a cache when it brings the very keys that the cache's update returned, so
    that a forward pass which failed half-way leaves nothing behind for the next.
    """
    cache = current_cache.get()
    if cache is not None and cache.awaits(key):
        current_cache.set(None)
        output = cache.attend(module, query, attention_mask, scaling, dropout=dropout, **kwargs)
        return output, None
    sdpa = AttentionInterface()["sdpa"]
    return sdpa(  # type: ignore[no-any-return]
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
    )


def _mask(*, attention_mask: Tensor | None = None, kv_offset: Any = 0, **kwargs: Any) -> Any:
    """The mask of sdpa; None for a cache that attends itself, unless the model wants another.

    A mask of the model's own, which it does not allow to be skipped, is refused by the cache.
    """
    if isinstance(kv_offset, Unmasked) and kwargs.get("allow_is_causal_skip"):
        if attention_mask is not None and not attention_mask.all():
            raise Unsupported(_NO_MASKS)
        return None
    sdpa = AttentionMaskInterface()["sdpa"]
    return sdpa(attention_mask=attention_mask, kv_offset=kv_offset, **kwargs)


def check_attention(
    module: torch.nn.Module,
    query: Tensor,
    mask: Tensor | None,
    window: int | None,
    asked: dict[str, Any],
) -> None:
    """Refuse what attention within the layer's window would leave out without a word."""
    if mask is not None:
        raise Unsupported(_NO_MASKS)
    if query.requires_grad:
        raise Unsupported("a KvdCache has no gradients: call the model under torch.no_grad()")
    unknown = [name for name in _UNKNOWN_TO_ATTEND if asked.get(name) is not None]
    if unknown or asked.get("dropout"):
        raise Unsupported(f"kvd's attention has no {', '.join(unknown) or 'dropout'}")
    if (sliding := asked.get("sliding_window")) != window:
        raise Unsupported(f"a layer asks for a window of {sliding}, its config for {window}")
    if not getattr(module, "is_causal", True):
        raise Unsupported("kvd's attention is causal, and this layer's is not")


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
