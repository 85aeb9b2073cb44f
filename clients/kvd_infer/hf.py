"""Hugging Face: a Cache whose keys and values lie in pages leased from kvd.

    model.set_attn_implementation("kvd")
    with Client() as client:
        namespace = client.open(identity_of(model), layout_of(model))
        generation = generate(model, namespace, input_ids, max_new_tokens=64, do_sample=False)

or, where more is to be done between the steps, what `generate` does for the caller:

        with KvdCache(namespace, model, input_ids) as cache:
            output = model.generate(input_ids, **cache.as_kwargs(), max_new_tokens=64)
            cache.commit(output)

Importing this module registers the attention implementation "kvd". With a KvdCache it attends to
the pages in place; without one it is transformers' own "sdpa", masks and all.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kvd_client import LeaseEnded, Namespace, Unsupported
from kvd_infer.hf_attention import NAME
from kvd_infer.hf_cache import KvdCache
from kvd_infer.hf_model import identity_of, layout_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["NAME", "Generation", "KvdCache", "generate", "identity_of", "layout_of"]

logger = logging.getLogger(__name__)

# A generation whose lease ended is done again; the last time in private memory.
MAX_ATTEMPTS = 4

_ONLY_IDS = "kvd knows prompts by their token ids alone: leave it out"
_ITS_OWN_CACHE = "`generate` makes the cache itself: for another one call model.generate"

# What model.generate takes and this one cannot, and what to do about it.
_REFUSED = {
    "inputs": "give the prompt as input_ids",
    "inputs_embeds": _ONLY_IDS,
    "token_type_ids": _ONLY_IDS,
    "cache": _ITS_OWN_CACHE,
    "past_key_values": _ITS_OWN_CACHE,
    "cache_implementation": _ITS_OWN_CACHE,
}


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What `generate` made: `output` is transformers' own answer, `sequences` the ids in it.

    Of `prompt_tokens`, `reused_tokens` came from kvd; `committed_tokens` of the whole sequence lie
    there now. `attempts` is 1 unless leases ended on the way.
    """

    output: Any
    sequences: Tensor
    prompt_tokens: int
    reused_tokens: int
    committed_tokens: int
    attempts: int


def generate(
    model: PreTrainedModel,
    namespace: Namespace | None,
    input_ids: Tensor,
    *,
    streamer: BaseStreamer | None = None,
    **arguments: Any,
) -> Generation:
    """`model.generate` with what kvd knows of the prompt; what is computed is committed there.

    Whatever becomes of the daemon, the caller gets the tokens: where a lease ends under way, what
    was computed is dropped and done again, with the same random numbers; where there is no daemon
    or no page, private memory is used. A streamer gets each token once.

    `input_ids` is `[1, tokens]`, without padding. Assisted decoding works, and shares what it
    computes, but transformers computes the whole prompt for it. Raises BadRequest for what is no
    prompt, Unsupported for more than one sequence, beams, and models that kvd cannot hold.
    """
    _check_arguments(model, arguments)
    random_state = torch.get_rng_state()
    if streamer is not None:
        arguments["streamer"] = streamer = _OnceStreamer(streamer)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        where = namespace if attempt < MAX_ATTEMPTS else None
        try:
            with KvdCache(where, model, input_ids) as cache:
                call: Any = model.generate
                output = call(input_ids, **cache.as_kwargs(), **arguments)
                sequences = output if isinstance(output, Tensor) else output.sequences
                return Generation(
                    output=output,
                    sequences=sequences,
                    prompt_tokens=input_ids.shape[1],
                    reused_tokens=cache.reused_tokens,
                    committed_tokens=cache.commit(sequences),
                    attempts=attempt,
                )
        except LeaseEnded as error:
            logger.warning("generating again, attempt %d was void: %s", attempt, error)
            if where is not None:
                # A restart takes less than to compute what it has kept.
                where.client.wait_attached(where.client.timeout)
            torch.set_rng_state(random_state)
            if streamer is not None:
                streamer.begin_again()
    raise AssertionError("private memory has no lease that could end")


def _check_arguments(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Refuse, with Unsupported, what `model.generate` would take for something else."""
    for name, advice in _REFUSED.items():
        if name in arguments:
            raise Unsupported(f"{name}: {advice}")
    config: Any = arguments.get("generation_config") or model.generation_config
    if arguments.get("use_cache", config.use_cache) is False:
        raise Unsupported("use_cache is False: without a cache there is no use of kvd")


class _OnceStreamer(BaseStreamer):
    """Passes on what the streamer has not had yet, however often generation begins again."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer = streamer
        self._num_passed = 0
        self._num_seen = 0

    def begin_again(self) -> None:
        self._num_seen = 0

    def put(self, value: Tensor) -> None:
        self._num_seen += 1
        if self._num_seen > self._num_passed:
            self._num_passed += 1
            self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()
