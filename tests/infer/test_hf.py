"""Models that read their KV from kvd compute what they compute without it.

Each equality has its negative twin: the same comparison over damaged pages must fail. Whole blocks
are never exchanged for damage: no model with rotary positions would notice.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from demo import models, recall
from kvd.testing.daemons import running_daemon
from kvd_client import BadRequest, Client, KvdError, Lease, Namespace, Unsupported
from kvd_infer.hf import generate, identity_of, layout_of
from tests.e2e.support import capacity_of
from tests.infer.conftest import OpenFor, attached, page_of, plain_logits, tolerance_of
from tests.infer.runs import (
    STEPS,
    At,
    assert_greedy,
    difference,
    greedy,
    logits_with_kvd,
    num_leases,
    prompt,
    tiny_gpt2,
    with_kvd,
)

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedModel

    from kvd.testing.daemons import RunningDaemon

pytestmark = pytest.mark.usefixtures("one_thread")

Array: TypeAlias = NDArray[Any]

ROOT = Path(__file__).parents[2]
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 700]


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_logits_are_those_of_a_run_without_kvd(
    model: LlamaForCausalLM, plain: LlamaForCausalLM, open_for: OpenFor, num_tokens: int
) -> None:
    ids = prompt(num_tokens)
    expected = plain_logits(plain, ids)
    tolerance = tolerance_of(plain, prompt(max(num_tokens, 2)))

    cold, none_reused = logits_with_kvd(model, open_for(model), ids)
    warm, reused = logits_with_kvd(model, open_for(model), ids)

    assert (none_reused, reused) == (0, min(num_tokens - 1, num_tokens // 16 * 16))
    assert difference(cold, expected) <= tolerance
    assert difference(warm, expected[:, reused:]) <= tolerance


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_greedy_tokens_are_those_of_a_run_without_kvd(
    model: LlamaForCausalLM, plain: LlamaForCausalLM, open_for: OpenFor, num_tokens: int
) -> None:
    ids = prompt(num_tokens)
    cold = greedy(model, open_for(model), ids)
    warm = greedy(model, open_for(model), ids)
    assert (cold.reused_tokens, warm.reused_tokens) == (0, num_tokens - 1)
    for generation in (cold, warm):
        assert generation.prompt_tokens == num_tokens
        assert_greedy(plain, generation.sequences, num_tokens)


@pytest.mark.parametrize("kv_heads", [1, 2, 4], ids=["MQA", "GQA", "MHA"])
def test_heads_may_share_keys(open_for: OpenFor, kv_heads: int) -> None:
    model, ids = with_kvd(num_key_value_heads=kv_heads), prompt(41)
    plain = models.tiny_llama(num_key_value_heads=kv_heads)
    logits_with_kvd(model, open_for(model), ids)
    warm, reused = logits_with_kvd(model, open_for(model), ids)
    assert reused == 32
    assert difference(warm, plain_logits(plain, ids, 32)) <= tolerance_of(plain, ids)


def test_bfloat16_lies_in_pages_too(open_for: OpenFor) -> None:
    model, plain, ids = with_kvd().bfloat16(), models.tiny_llama().bfloat16(), prompt(48)
    namespace, expected = open_for(model), plain_logits(plain, ids, 47)
    logits_with_kvd(model, namespace, ids)
    warm, reused = logits_with_kvd(model, namespace, ids)
    assert reused == 47
    # The logits are below 8, where neighbours in bfloat16 are 1/32 apart.
    assert difference(warm, expected) <= 4 / 32

    values_shifted(page := page_at(namespace, ids, 1), page)
    assert difference(logits_with_kvd(model, namespace, ids)[0], expected) > 4 / 32


def test_generated_blocks_are_reused_as_a_prefix(
    model: LlamaForCausalLM, plain: LlamaForCausalLM, open_for: OpenFor
) -> None:
    first = greedy(model, open_for(model), prompt(30))  # 30 + 24 - 1 tokens have KV
    assert first.committed_tokens == 48
    longer = torch.cat([first.sequences, prompt(20)], 1)
    second = greedy(model, open_for(model), longer)
    assert second.reused_tokens == 48
    assert_greedy(plain, second.sequences, longer.shape[1])


def test_prompt_may_be_computed_in_chunks(
    model: LlamaForCausalLM, plain: LlamaForCausalLM, open_for: OpenFor
) -> None:
    ids = prompt(100)
    cold = greedy(model, open_for(model), ids, prefill_chunk_size=23)
    assert_greedy(plain, cold.sequences, 100)


@pytest.mark.skipif(
    transformers.__version__ < "5.23", reason="5.19 computes all chunks, whatever the cache has"
)
def test_rest_of_a_prompt_may_be_computed_in_chunks(
    model: LlamaForCausalLM, plain: LlamaForCausalLM, open_for: OpenFor
) -> None:
    ids = prompt(100)
    greedy(model, open_for(model), ids[:, :40])
    chunked = greedy(model, open_for(model), ids, prefill_chunk_size=23)
    assert chunked.reused_tokens == 40
    assert_greedy(plain, chunked.sequences, 100)


def test_gpt2_computes_what_it_does_without_kvd(open_for: OpenFor) -> None:
    model, plain, ids = gpt2_with_kvd(), tiny_gpt2(), prompt(50)
    cold = greedy(model, open_for(model), ids)
    warm = greedy(model, namespace := open_for(model), ids)
    assert (cold.reused_tokens, warm.reused_tokens) == (0, 49)
    for generation in (cold, warm):
        assert_greedy(plain, generation.sequences, 50)

    expected = plain_logits(plain, ids, 49)
    assert difference(logits_with_kvd(model, namespace, ids)[0], expected) <= 1e-4
    values_shifted(page := page_at(namespace, ids, 1), page)
    assert difference(logits_with_kvd(model, namespace, ids)[0], expected) > 1e-2


SAMPLINGS = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8, "temperature": 1.5},
    {"min_p": 0.05},
]
PROMPT_LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 3}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_samples_are_those_of_a_run_without_kvd(
    model: LlamaForCausalLM,
    plain: LlamaForCausalLM,
    open_for: OpenFor,
    sampling: dict[str, Any],
) -> None:
    ids, sampling = prompt(40), {"max_new_tokens": STEPS, "do_sample": True} | sampling
    torch.manual_seed(7)
    expected = plain.generate(ids, **sampling)
    assert not expected.equal(plain.generate(ids, **sampling))
    for reused in (0, 39):
        torch.manual_seed(7)
        generation = generate(model, open_for(model), ids, **sampling)
        assert generation.reused_tokens == reused
        assert generation.sequences.equal(expected)


@pytest.mark.parametrize("has_model", [False, True], ids=["prompt lookup", "assistant"])
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_assisted_decoding_finds_the_same_tokens(
    model: LlamaForCausalLM,
    plain: LlamaForCausalLM,
    open_for: OpenFor,
    has_model: bool,
    is_warm: bool,
) -> None:
    ids, namespace, assistance = prompt(20).repeat(1, 2), open_for(model), PROMPT_LOOKUP
    if has_model:
        assistance = {"assistant_model": models.tiny_llama(num_hidden_layers=1)}
    if is_warm:
        greedy(model, namespace, ids)
    assisted = greedy(model, namespace, ids, **assistance)
    assert_greedy(plain, assisted.sequences, 40)
    assert (assisted.reused_tokens, assisted.committed_tokens) == (0, 48)
    warm, reused = logits_with_kvd(model, namespace, assisted.sequences)
    assert reused == 48
    expected = plain_logits(plain, assisted.sequences, 48)
    assert difference(warm, expected) <= tolerance_of(plain, assisted.sequences)


def test_revisions_never_meet(model: LlamaForCausalLM, open_for: OpenFor) -> None:
    ids = prompt(33)
    assert greedy(model, open_for(model, "r1"), ids).reused_tokens == 0
    assert greedy(model, open_for(model, "r2"), ids).reused_tokens == 0
    assert greedy(model, open_for(model, "r1"), ids).reused_tokens == 32


@pytest.mark.parametrize("num_common", [1, 15, 16, 17, 31, 32, 33])
def test_prompts_share_the_tokens_that_they_have_in_common(
    model: LlamaForCausalLM, plain: LlamaForCausalLM, open_for: OpenFor, num_common: int
) -> None:
    one, other = prompt(50), prompt(50)
    other[0, num_common:] = (other[0, num_common:] + 1) % 256
    logits_with_kvd(model, open_for(model), one)
    for each, found in ((other, num_common), (one, 48)):  # neither has become part of the other
        logits, reused = logits_with_kvd(model, open_for(model), each)
        assert reused == found
        assert difference(logits, plain_logits(plain, each, found)) <= tolerance_of(plain, each)


@pytest.mark.parametrize("maps", [(False, False), (True, False), (False, True)])
def test_clients_that_do_not_map_compute_the_same(
    model: LlamaForCausalLM, plain: LlamaForCausalLM, daemon: RunningDaemon, maps: tuple[bool, bool]
) -> None:
    for is_mapped, reused in zip(maps, (0, 39), strict=True):
        with attached(daemon, maps=is_mapped) as client:
            namespace = client.open(identity_of(model), layout_of(model))
            generation = greedy(model, namespace, prompt(40))
        assert generation.reused_tokens == reused
        assert_greedy(plain, generation.sequences, 40)


# --- negative twins: the comparisons above do notice damage ---


def zeroed(page: Array, other: Array) -> None:
    page[:] = 0


def stale(page: Array, other: Array) -> None:
    page[:] = other


def values_shifted(page: Array, other: Array) -> None:
    page[:, 1] = np.roll(page[:, 1], 1, axis=1)


def keys_only(page: Array, other: Array) -> None:
    page[:, 0] = other[:, 0]


def values_of_last_layer(page: Array, other: Array) -> None:
    page[-1, 1] = 0


DAMAGES = pytest.mark.parametrize(
    "damage", [zeroed, stale, values_shifted, keys_only, values_of_last_layer]
)


def gpt2_with_kvd() -> PreTrainedModel:
    model = tiny_gpt2()
    model.set_attn_implementation("kvd")
    return model


def page_at(namespace: Namespace, ids: Tensor, block: int) -> Array:
    with namespace.match(ids[0].numpy()) as lease:
        return page_of(namespace, int(lease.pages[block]))


@DAMAGES
@pytest.mark.parametrize("block", [1, 2], ids=["whole", "tail"])
def test_damage_shows_in_logits(
    model: LlamaForCausalLM,
    plain: LlamaForCausalLM,
    open_for: OpenFor,
    damage: Callable[[Array, Array], None],
    block: int,
) -> None:
    ids, other, namespace = prompt(48), prompt(48, seed=1), open_for(model)
    for one in (ids, other):
        logits_with_kvd(model, namespace, one)
    damage(page_at(namespace, ids, block), page_at(namespace, other, block))
    warm, reused = logits_with_kvd(model, namespace, ids)
    assert reused == 47
    assert difference(warm, plain_logits(plain, ids, 47)) > 100 * tolerance_of(plain, ids)


@DAMAGES
def test_damage_shows_in_greedy_tokens(
    model: LlamaForCausalLM,
    plain: LlamaForCausalLM,
    open_for: OpenFor,
    damage: Callable[[Array, Array], None],
) -> None:
    ids, other, namespace = prompt(48), prompt(48, seed=1), open_for(model)
    for one in (ids, other):
        greedy(model, namespace, one)
    damage(page_at(namespace, ids, 1), page_at(namespace, other, 1))
    generation = greedy(model, namespace, ids)
    assert generation.reused_tokens == 47
    with pytest.raises(AssertionError):
        assert_greedy(plain, generation.sequences, 48)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_recall_model_names_the_damaged_block(
    recall_dir: Path, open_for: OpenFor, is_damaged: bool
) -> None:
    model = models.load(recall_dir, attn_implementation="kvd")
    namespace = open_for(model, block_size=recall.BLOCK_SIZE)
    ids, logits = recall.prompts(4, seed=3), []
    for row in ids:
        logits_with_kvd(model, namespace, row[None])
        if is_damaged:
            values_shifted(page := page_at(namespace, row[None], 2), page)
        suffix, reused = logits_with_kvd(model, namespace, torch.cat([row, row])[None])
        assert reused == len(row)
        logits.append(suffix[0])
    errors = recall.errors_by_block(torch.stack(logits), ids)
    if is_damaged:
        assert errors.pop(2) > 0.9
    assert max(errors[1:]) < 0.05


PROGRAM = """
import sys, torch
from kvd_client import Client
from kvd_infer.hf import generate, identity_of, layout_of
from tests.infer.runs import tiny_gpt2, tiny_llama
torch.set_num_threads(1)
with Client(sys.argv[1], timeout=60) as client:
    assert client.wait_attached(60)
    for model in (tiny_llama(), tiny_gpt2()):
        model.set_attn_implementation("kvd")
        namespace = client.open(identity_of(model), layout_of(model))
        ids = torch.arange(200)[None]
        generation = generate(model, namespace, ids, max_new_tokens=24, do_sample=False)
        print(generation.reused_tokens, *generation.sequences[0].tolist())
"""


def test_processes_reuse_each_others_prefixes(daemon: RunningDaemon) -> None:
    program = [sys.executable, "-c", PROGRAM, daemon.endpoint]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    for make, line in zip((models.tiny_llama, tiny_gpt2), done.stdout.splitlines(), strict=True):
        reused, *theirs = map(int, line.split())
        plain, model = make(), make()
        model.set_attn_implementation("kvd")
        with attached(daemon) as client:
            namespace = client.open(identity_of(model), layout_of(model))
            ours = greedy(model, namespace, torch.arange(200)[None])
        assert (reused, ours.reused_tokens) == (0, 199)
        assert_greedy(plain, torch.tensor([theirs]), 200)
        assert_greedy(plain, ours.sequences, 200)


# --- outages ---


@pytest.mark.parametrize(
    ("layer", "nth"), [(0, 1), (1, 1), (0, 9)], ids=["prefill", "end", "decode"]
)
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_restart_of_the_daemon_changes_no_token(
    model: LlamaForCausalLM, daemon: RunningDaemon, layer: int, nth: int, is_warm: bool
) -> None:
    ids = prompt(100)
    with attached(daemon) as client:
        namespace = client.open(identity_of(model), layout_of(model))
        expected = greedy(model, None, ids).sequences
        if is_warm:
            greedy(model, namespace, ids[:, :60])
        with closing(At(model, layer, nth, daemon.restart)):
            generation = greedy(model, namespace, ids)
        assert generation.attempts == 2
        assert generation.sequences.equal(expected)


def test_daemon_that_stays_away_changes_no_token(
    model: LlamaForCausalLM, daemon: RunningDaemon
) -> None:
    ids = prompt(250)  # the pages reserved at first end while it generates
    with attached(daemon) as client:
        namespace = client.open(identity_of(model), layout_of(model))
        expected = greedy(model, None, ids).sequences
        with closing(At(model, 0, 2, daemon.kill)):
            generation = greedy(model, namespace, ids)
        assert generation.sequences.equal(expected)
        assert (generation.attempts, generation.committed_tokens) == (1, 240)
        assert greedy(model, namespace, ids).sequences.equal(expected)


def test_without_any_daemon_it_generates_the_same(model: LlamaForCausalLM, tmp_path: Path) -> None:
    ids = prompt(40)
    with Client(f"ipc://{tmp_path}/nobody.sock", timeout=0.1) as client:
        namespace = client.open(identity_of(model), layout_of(model))
        generation = greedy(model, namespace, ids)
    assert generation.sequences.equal(greedy(model, None, ids).sequences)
    assert (generation.reused_tokens, generation.committed_tokens) == (0, 0)


def test_daemon_that_fails_at_a_request_changes_no_token(
    model: LlamaForCausalLM, open_for: OpenFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, namespace = prompt(40), open_for(model)

    def fail(*args: object, **kwargs: object) -> None:
        raise KvdError("internal error; see kvd's log")

    expected = greedy(model, None, ids).sequences
    for where, verb in ((Lease, "commit"), (Lease, "reserve"), (namespace, "match")):
        monkeypatch.setattr(where, verb, fail)
        generation = greedy(model, namespace, ids)
        assert generation.sequences.equal(expected)
        assert (generation.attempts, generation.committed_tokens) == (1, 0)


@pytest.mark.parametrize("num_tokens", [1500, 1016, 40])
def test_too_few_pages_change_no_token(
    plain: LlamaForCausalLM,
    model: LlamaForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
) -> None:
    """Pages for 1024 tokens: too few for the prompt, for what is generated, for anything."""
    monkeypatch.setattr("kvd_infer.rows.RESERVE_SECONDS", 0.1)
    layout = layout_of(model)
    settings = {
        "tiers": [{"type": "host", "capacity_bytes": capacity_of(64, layout)}],
        "limits": {"session_reserved_fraction": 1.0},
        "cache": {"high_watermark": 1.0, "low_watermark": 1.0},
    }
    ids = prompt(num_tokens)
    with running_daemon(settings) as daemon, attached(daemon) as client:
        namespace = client.open(identity_of(model), layout)
        taken = 1024 if num_tokens == 40 else 0
        with namespace.match([], reserve_tokens=taken) as lease:
            assert lease.capacity_tokens == taken
            generation = greedy(model, namespace, ids)
    assert_greedy(plain, generation.sequences, num_tokens)
    assert generation.attempts == 1


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.ids: list[int] = []

    def put(self, value: Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.ids.append(-1)


def test_restart_draws_no_other_sample_and_streams_no_token_twice(
    model: LlamaForCausalLM, daemon: RunningDaemon
) -> None:
    ids, recorder = prompt(40), Recorder()
    sampling = {"do_sample": True, "streamer": recorder}
    with attached(daemon) as client:
        namespace = client.open(identity_of(model), layout_of(model))
        torch.manual_seed(7)
        expected = greedy(model, None, ids, do_sample=True).sequences
        torch.manual_seed(7)
        with closing(At(model, 0, 9, daemon.restart)):
            generation = greedy(model, namespace, ids, **sampling)
    assert generation.attempts == 2
    assert generation.sequences.equal(expected)
    assert recorder.ids == [*expected[0].tolist(), -1]


# --- refusals ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, "one sequence"),
        ({"num_return_sequences": 2, "do_sample": True}, "one sequence"),
        ({"use_cache": False}, "use_cache"),
        ({"generation_config": GenerationConfig(use_cache=False)}, "use_cache"),
        ({"inputs": torch.arange(4)[None]}, "input_ids"),
        ({"inputs_embeds": torch.zeros(1, 4, 64)}, "token ids"),
        ({"token_type_ids": torch.zeros(1, 4)}, "token ids"),
        ({"cache": None}, "makes the cache itself"),
        ({"past_key_values": None}, "makes the cache itself"),
        ({"cache_implementation": "static"}, "makes the cache itself"),
        ({"attention_mask": torch.tensor([[0] * 3 + [1] * 37])}, "padding"),
    ],
)
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_generate_refuses(
    model: LlamaForCausalLM,
    open_for: OpenFor,
    arguments: dict[str, Any],
    message: str,
    is_warm: bool,
) -> None:
    ids, namespace = prompt(20).repeat(1, 2), open_for(model)
    if is_warm:
        greedy(model, namespace, ids)
    with pytest.raises(Unsupported, match=message):
        greedy(model, namespace, ids, **arguments)
    assert num_leases(namespace) == 0


@pytest.mark.parametrize("ids", [None, [1, 2], [[1, 2]], {"input_ids": torch.arange(4)[None]}])
def test_generate_wants_its_ids_in_a_tensor(model: LlamaForCausalLM, ids: Any) -> None:
    with pytest.raises(BadRequest, match="not a tensor"):
        generate(model, None, ids)


@pytest.mark.parametrize("ids", [torch.rand(1, 4), torch.tensor([[1, -2, 3]])])
def test_generate_wants_ids(model: LlamaForCausalLM, open_for: OpenFor, ids: Tensor) -> None:
    with pytest.raises(BadRequest, match="integers"):
        generate(model, open_for(model), ids)


@pytest.mark.parametrize("ids", [torch.arange(4), torch.arange(8).view(2, 4), torch.ones(1, 0)])
def test_generate_wants_one_prompt(model: LlamaForCausalLM, ids: Tensor) -> None:
    with pytest.raises(Unsupported, match="one KvdCache for each prompt"):
        generate(model, None, ids)
