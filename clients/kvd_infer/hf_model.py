"""What KV a Hugging Face model makes: its identity, its layout, and which models kvd refuses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import get_layer_types_and_kwargs

from kvd_client import Identity, Layout, Unsupported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Rotary embeddings whose keys depend on how long the prompt is, not on positions alone.
UNSTABLE_ROPE = ("dynamic", "longrope")
# Layers that keep KV of every token, and attend to all of them or within a window.
KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def identity_of(
    model: PreTrainedModel, revision: str | None = None, *, adapter: str = ""
) -> Identity:
    """Which model this is; without a revision, by a digest of all weights as they are now.

    The digest reads every weight, about a second per gigabyte; with it, a folder goes by its last
    name alone. A revision that is named is the caller's word for all of them: weights changed in
    memory (merged adapters, training, pruning) are another revision. Raises Unsupported for
    adapters that `adapter` does not name.
    """
    config = model.config
    if not adapter and _has_adapter(model):
        raise Unsupported("the model has an adapter: name it, with its version, as `adapter`")
    positions = {
        "rope": getattr(config, "rope_parameters", None),
        "max_positions": getattr(config, "max_position_embeddings", None),
    }
    if (window := getattr(config, "sliding_window", None)) is not None:
        positions["window"] = window
    name = config.name_or_path or config.model_type
    if not revision and Path(name).is_dir():
        name = Path(name).resolve().name  # by its digest it is the same wherever it lies
    return Identity(
        model=name,
        revision=revision or _digest(model),
        adapter=adapter,
        positions=_canonical(positions),
    )


def _has_adapter(model: PreTrainedModel) -> bool:
    """Loaded by transformers, or put around its layers by peft."""
    return getattr(model, "_hf_peft_config_loaded", False) or any(
        ".base_layer" in name or "lora_" in name for name, _ in model.named_modules()
    )


def layout_of(model: PreTrainedModel, *, block_size: int = 16) -> Layout:
    """How a block of this model's KV lies in bytes. Raises Unsupported for what kvd cannot hold."""
    config = model.config
    check_model(model)
    return Layout(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_size=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        dtype=str(model.dtype).removeprefix("torch."),  # type: ignore[arg-type]  # is checked
        block_size=block_size,
    )


def windows_of(model: PreTrainedModel) -> list[int | None]:
    """How many tokens a query sees in each layer, its own among them; None: all of them."""
    _, settings = get_layer_types_and_kwargs(model.config)
    return [its_settings.get("sliding_window") for its_settings in settings]


def check_model(model: PreTrainedModel) -> None:
    """Refuse, with Unsupported, models whose KV kvd cannot hold or would mistake."""
    config = model.config
    reads_more = config.is_encoder_decoder or getattr(config, "add_cross_attention", False)
    if reads_more or config.get_text_config() is not config:
        raise Unsupported(
            f"{config.model_type}: kvd knows prompts by their token ids alone, so only models "
            "that read nothing else can use it"
        )
    kinds, _ = get_layer_types_and_kwargs(config)
    if unknown := set(kinds) - KNOWN_LAYERS:
        raise Unsupported(
            f"{config.model_type} has layers of {', '.join(sorted(unknown))}: kvd knows attention "
            "to all tokens or within a sliding window; use transformers' DynamicCache"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *rope.values()):  # one for all layers, or one for each type of layer
        if isinstance(one, dict) and one.get("rope_type") in UNSTABLE_ROPE:
            raise Unsupported(
                f"rope_type {one['rope_type']!r}: its keys depend on the length of the prompt, so "
                "a prefix of one is not that of another; use transformers' DynamicCache"
            )
    dtype = str(model.dtype).removeprefix("torch.")
    if model.device.type != "cpu" or dtype not in ("float32", "bfloat16", "float16", "float64"):
        raise Unsupported(f"the model is {dtype} on {model.device}: kvd's attention runs on CPUs")


def _digest(model: PreTrainedModel) -> str:
    """SHA-256 over the configuration and every weight: name, dtype, shape and bytes."""
    names = model.config.to_dict().items()
    config = {k: v for k, v in names if not k.startswith("_") and k != "transformers_version"}
    digest = hashlib.sha256(_canonical(config).encode())
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        digest.update(weight.detach().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
