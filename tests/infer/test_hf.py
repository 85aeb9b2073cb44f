"""Models that read their KV from kvd compute what they compute without it.

Each equality has its negative twin: the same comparison over damaged pages must fail. Whole blocks
are never exchanged for damage: no model with rotary positions would notice.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.generation.streamers import BaseStreamer

from demo import models, recall
from kvd.testing.daemons import running_daemon
from kvd_client import BadRequest, Client, KvdError, Lease, LeaseEnded, Namespace, Unsupported
from kvd_infer import rows
from kvd_infer.hf import Generation, KvdCache, generate, identity_of, layout_of
from tests.infer.conftest import (
    PATIENCE_SECONDS,
    OpenFor,
    attached,
    page_of,
    plain_logits,
    tolerance_of,
)

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon

Array: TypeAlias = NDArray[Any]

ROOT = Path(__file__).parents[2]
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 700]
STEPS = 24


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too, pages that are there are waited for."""
    monkeypatch.setattr(rows, "RESERVE_SECONDS", PATIENCE_SECONDS)


@pytest.fixture(autouse=True)
def one_thread(_two_threads: None) -> Iterator[None]:
    """Small models gain nothing from a second thread, which others want."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> LlamaForCausalLM:
    return with_kvd()


@pytest.fixture
def plain() -> LlamaForCausalLM:
    return models.tiny_llama()


def with_kvd(**overrides: Any) -> LlamaForCausalLM:
    model = models.tiny_llama(**overrides)
    model.set_attn_implementation("kvd")
    return model


def prompt(num_tokens: int, seed: int = 0) -> Tensor:
    data = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randint(0, 256, (1, num_tokens), generator=data)


def logits_with_kvd(
    model: LlamaForCausalLM, namespace: Namespace | None, ids: Tensor
) -> tuple[Tensor, int]:
    """Logits of the tokens that kvd did not have, and how many it had."""
    with KvdCache(namespace, model, ids) as cache, torch.no_grad():
        reused = cache.reused_tokens
        return model(ids[:, reused:], **cache.as_kwargs()).logits, reused


def greedy(
    model: LlamaForCausalLM, namespace: Namespace | None, ids: Tensor, **arguments: Any
) -> Generation:
    arguments = {"max_new_tokens": STEPS, "do_sample": False} | arguments
    return generate(model, namespace, ids, **arguments)


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def assert_greedy(plain: LlamaForCausalLM, sequences: Tensor, num_prompt: int) -> None:
    """Each token is the best one, by a model without kvd, after those before it.

    Two that are closer than the tolerance are equally good; what follows is judged by itself.
    """
    assert sequences.shape[1] == num_prompt + STEPS
    judged = plain_logits(plain, sequences)[0, num_prompt - 1 : -1]
    chosen = judged.gather(1, sequences[0, num_prompt:, None])[:, 0]
    assert float((judged.max(1).values - chosen).max()) <= tolerance_of(plain, sequences)


# --- equality ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_logits_are_those_of_a_run_without_kvd(
    model: LlamaForCausalLM, plain: LlamaForCausalLM, open_for: OpenFor, num_tokens: int
) -> None:
    ids = prompt(num_tokens)
    expected = plain_logits(plain, ids)
    tolerance = tolerance_of(plain, prompt(max(num_tokens, 2)))

    cold, none_reused = logits_with_kvd(model, open_for(model), ids)
    warm, reused = logits_with_kvd(model, open_for(model), ids)

    assert (none_reused, reused) == (0, (num_tokens - 1) // 16 * 16)
    assert difference(cold, expected) <= tolerance
    assert difference(warm, expected[:, reused:]) <= tolerance


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_greedy_tokens_are_those_of_a_run_without_kvd(
    model: LlamaForCausalLM, plain: LlamaForCausalLM, open_for: OpenFor, num_tokens: int
) -> None:
    ids = prompt(num_tokens)
    cold = greedy(model, open_for(model), ids)
    warm = greedy(model, open_for(model), ids)
    assert (cold.reused_tokens, warm.reused_tokens) == (0, (num_tokens - 1) // 16 * 16)
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
    namespace, expected = open_for(model), plain_logits(plain, ids, 32)
    logits_with_kvd(model, namespace, ids)
    warm, reused = logits_with_kvd(model, namespace, ids)
    assert reused == 32
    # The logits are below 8, where neighbours in bfloat16 are 1/32 apart.
    assert difference(warm, expected) <= 4 / 32

    values_shifted(page := second_page(namespace, ids), page)
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
    greedy(model, open_for(model), ids[:, :40])
    chunked = greedy(model, open_for(model), ids, prefill_chunk_size=23)
    assert chunked.reused_tokens == 32
    assert_greedy(plain, chunked.sequences, 100)


def test_revisions_never_meet(model: LlamaForCausalLM, open_for: OpenFor) -> None:
    ids = prompt(33)
    assert greedy(model, open_for(model, "r1"), ids).reused_tokens == 0
    assert greedy(model, open_for(model, "r2"), ids).reused_tokens == 0
    assert greedy(model, open_for(model, "r1"), ids).reused_tokens == 32


def test_prompts_share_what_they_have_in_common(
    model: LlamaForCausalLM, plain: LlamaForCausalLM, open_for: OpenFor
) -> None:
    one, other = prompt(100), prompt(100)
    other[0, 50:] = (other[0, 50:] + 1) % 256
    greedy(model, open_for(model), one)
    generation = greedy(model, open_for(model), other)
    assert generation.reused_tokens == 48
    assert_greedy(plain, generation.sequences, 100)


# --- negative twins: the comparisons above do notice damage ------------------------------------


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


def second_page(namespace: Namespace, ids: Tensor) -> Array:
    with namespace.match(ids[0].numpy()) as lease:
        return page_of(namespace, int(lease.pages[1]))


@DAMAGES
def test_damage_shows_in_logits(
    model: LlamaForCausalLM,
    plain: LlamaForCausalLM,
    open_for: OpenFor,
    damage: Callable[[Array, Array], None],
) -> None:
    ids, other, namespace = prompt(48), prompt(48, seed=1), open_for(model)
    for one in (ids, other):
        logits_with_kvd(model, namespace, one)
    damage(second_page(namespace, ids), second_page(namespace, other))
    warm, reused = logits_with_kvd(model, namespace, ids)
    assert reused == 32
    assert difference(warm, plain_logits(plain, ids, 32)) > 100 * tolerance_of(plain, ids)


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
    damage(second_page(namespace, ids), second_page(namespace, other))
    generation = greedy(model, namespace, ids)
    assert generation.reused_tokens == 32
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
            with namespace.match(row.numpy()) as lease:
                values_shifted(page := page_of(namespace, int(lease.pages[2])), page)
        suffix, reused = logits_with_kvd(model, namespace, torch.cat([row, row])[None])
        assert reused == len(row)
        logits.append(suffix[0])
    errors = recall.errors_by_block(torch.stack(logits), ids)
    if is_damaged:
        assert errors.pop(2) > 0.9
    assert max(errors[1:]) < 0.05


# --- outages -----------------------------------------------------------------------------------


class At:
    """A hook that does something once, when a layer is reached for the n-th time."""

    def __init__(
        self, model: LlamaForCausalLM, layer: int, nth: int, do: Callable[[], object]
    ) -> None:
        self._left = nth
        self._do = do
        self._handle = model.model.layers[layer].register_forward_hook(self)

    def __call__(self, *args: object) -> None:
        self._left -= 1
        if self._left == 0:
            self._do()

    def close(self) -> None:
        assert self._left <= 0, "the layer was not reached"
        self._handle.remove()


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
    monkeypatch.setattr(rows, "RESERVE_SECONDS", 0.1)
    layout = layout_of(model)
    settings = {
        "tiers": [{"type": "host", "capacity_bytes": 64 * layout.page_bytes}],
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


def test_forward_raises_when_its_lease_has_ended(
    model: LlamaForCausalLM, daemon: RunningDaemon
) -> None:
    ids = prompt(40)
    with attached(daemon) as client:
        namespace = client.open(identity_of(model), layout_of(model))
        with KvdCache(namespace, model, ids) as cache, torch.no_grad():
            model(ids, **cache.as_kwargs())
            daemon.restart()
            with pytest.raises(LeaseEnded):
                model(ids[:, :1], **cache.as_kwargs())


PROGRAM = """
import sys, torch
from demo.models import tiny_llama
from kvd_client import Client
from kvd_infer.hf import generate, identity_of, layout_of
torch.set_num_threads(1)
model = tiny_llama()
model.set_attn_implementation("kvd")
with Client(sys.argv[1], timeout=60) as client:
    assert client.wait_attached(60)
    namespace = client.open(identity_of(model), layout_of(model))
    ids = torch.arange(200)[None]
    generation = generate(model, namespace, ids, max_new_tokens=24, do_sample=False)
print(generation.reused_tokens, *generation.sequences[0].tolist())
"""


def test_processes_reuse_each_others_prefixes(
    model: LlamaForCausalLM, plain: LlamaForCausalLM, daemon: RunningDaemon
) -> None:
    program = [sys.executable, "-c", PROGRAM, daemon.endpoint]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    reused, *theirs = map(int, done.stdout.split())
    with attached(daemon) as client:
        namespace = client.open(identity_of(model), layout_of(model))
        ours = greedy(model, namespace, torch.arange(200)[None])
    assert (reused, ours.reused_tokens) == (0, 192)
    assert_greedy(plain, torch.tensor([theirs]), 200)
    assert_greedy(plain, ours.sequences, 200)


# --- the end of a cache ------------------------------------------------------------------------


def num_leases(namespace: Namespace) -> int:
    session = namespace.client.connection.core.session
    assert session is not None
    (status,) = (s for s in namespace.client.status().sessions if s.session == session.name)
    return status.num_leases


def test_closed_cache_holds_nothing(model: LlamaForCausalLM, open_for: OpenFor) -> None:
    namespace = open_for(model)
    cache = KvdCache(namespace, model, prompt(40))
    with torch.no_grad():
        model(prompt(40), **cache.as_kwargs())
    assert num_leases(namespace) == 1
    cache.close()
    cache.close()
    assert num_leases(namespace) == 0
    with pytest.raises(BadRequest, match="closed"), torch.no_grad():
        model(prompt(40), **cache.as_kwargs())


def test_forward_that_fails_leaves_nothing_behind(
    model: LlamaForCausalLM, plain: LlamaForCausalLM, open_for: OpenFor
) -> None:
    ids, namespace = prompt(40), open_for(model)

    def fail() -> None:
        raise RuntimeError("as if")

    with pytest.raises(RuntimeError), closing(At(model, 0, 1, fail)):
        greedy(model, namespace, ids)
    assert num_leases(namespace) == 0
    assert difference(plain_logits(model, ids, 16), plain_logits(plain, ids, 16)) == 0
    generation = greedy(model, namespace, ids)
    assert generation.reused_tokens == 0
    assert_greedy(plain, generation.sequences, 40)


def test_forward_that_failed_can_be_done_again(
    model: LlamaForCausalLM, plain: LlamaForCausalLM, open_for: OpenFor
) -> None:
    ids = prompt(40)

    def fail() -> None:
        raise RuntimeError("as if")

    with KvdCache(open_for(model), model, ids) as cache, torch.no_grad():
        with pytest.raises(RuntimeError), closing(At(model, 0, 1, fail)):
            model(ids, **cache.as_kwargs())
        logits = model(ids, **cache.as_kwargs()).logits
    assert difference(logits, plain_logits(plain, ids)) <= tolerance_of(plain, ids)


def test_commit_wants_the_cache_s_own_prompt(model: LlamaForCausalLM, open_for: OpenFor) -> None:
    with KvdCache(open_for(model), model, prompt(40)) as cache, pytest.raises(BadRequest):
        cache.commit(prompt(41))


# --- without a KvdCache, "kvd" is sdpa ----------------------------------------------------------


def test_plain_generate_with_padding_is_that_of_sdpa(
    model: LlamaForCausalLM, plain: LlamaForCausalLM
) -> None:
    ids, mask = prompt(40).view(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :7] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 8, "num_beams": 2, "do_sample": False}
    assert model.generate(ids, **arguments).equal(plain.generate(ids, **arguments))


def test_plain_cache_with_a_prefix_is_that_of_sdpa(
    model: LlamaForCausalLM, plain: LlamaForCausalLM
) -> None:
    assert plain_logits(model, prompt(40), 16).equal(plain_logits(plain, prompt(40), 16))


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, "one sequence"),
        ({"num_return_sequences": 2, "do_sample": True}, "one sequence"),
        ({"prompt_lookup_num_tokens": 3}, "assisted decoding"),
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


def test_forward_refuses_other_positions(model: LlamaForCausalLM) -> None:
    with KvdCache(None, model, prompt(20)) as cache, torch.no_grad():
        positions = torch.arange(1, 21)[None]
        with pytest.raises(Unsupported, match="position_ids"):
            model(prompt(20), position_ids=positions, **cache.as_kwargs())


def test_forward_refuses_gradients(model: LlamaForCausalLM) -> None:
    with KvdCache(None, model, prompt(20)) as cache, pytest.raises(Unsupported, match="no_grad"):
        model(prompt(20), **cache.as_kwargs())


def test_forward_refuses_more_tokens_than_the_prompt_has(model: LlamaForCausalLM) -> None:
    with KvdCache(None, model, prompt(20)) as cache, torch.no_grad(), pytest.raises(Unsupported):
        model(prompt(21), **cache.as_kwargs())


def test_attention_that_does_not_go_through_kvd_is_noticed(
    model: LlamaForCausalLM, plain: LlamaForCausalLM
) -> None:
    with pytest.raises(Unsupported, match="set_attn_implementation"):
        KvdCache(None, plain, prompt(20))
    noticed = pytest.raises(Unsupported, match="set_attn_implementation")
    with KvdCache(None, model, prompt(20)) as cache, torch.no_grad(), noticed:
        plain(prompt(20), **cache.as_kwargs())


def test_cache_is_of_one_prompt_and_one_model(model: LlamaForCausalLM, open_for: OpenFor) -> None:
    with pytest.raises(Unsupported, match="one KvdCache for each prompt"):
        KvdCache(None, model, prompt(20).view(2, 10))
    with pytest.raises(BadRequest, match="num_kv_heads 2 against 4"):
        KvdCache(open_for(model), with_kvd(num_key_value_heads=4), prompt(20))
    with KvdCache(None, model, prompt(20)) as cache, pytest.raises(Unsupported):
        cache.reset()


def test_layers_that_forget_are_refused() -> None:
    config = MistralConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, sliding_window=4,
    )  # fmt: skip
    with pytest.raises(Unsupported, match="full attention"):
        layout_of(MistralForCausalLM(config))


def test_keys_that_depend_on_the_prompt_s_length_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    with pytest.raises(Unsupported, match="rope_type"):
        layout_of(models.tiny_llama(rope_parameters=rope))


# --- identity ----------------------------------------------------------------------------------


def test_revision_is_given_or_a_digest(plain: LlamaForCausalLM) -> None:
    assert identity_of(plain, "r1").revision == "r1"
    assert len(identity_of(plain).revision) == 64
    plain.config._commit_hash = "c0ffee"  # says where the weights came from, not what they are now
    assert len(identity_of(plain).revision) == 64


def test_layers_with_an_adapter_around_them_are_refused_until_it_is_named(
    plain: LlamaForCausalLM,
) -> None:
    plain.model.layers[0].lora_A = torch.nn.Linear(2, 2)
    with pytest.raises(Unsupported, match="adapter"):
        identity_of(plain)
    assert identity_of(plain, adapter="mine@3").adapter == "mine@3"


def test_embeddings_in_place_of_ids_are_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(Unsupported, match="inputs_embeds"):
        generate(model, None, torch.arange(4)[None], inputs_embeds=torch.zeros(1, 4, 64))


def test_digest_tells_weights_apart(plain: LlamaForCausalLM, model: LlamaForCausalLM) -> None:
    assert identity_of(plain) == identity_of(model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] += 1e-3
    assert identity_of(plain) != identity_of(model)


def test_positions_tell_rotary_settings_apart(plain: LlamaForCausalLM) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    other = models.tiny_llama(rope_parameters=rope)
    assert identity_of(plain, "r").positions != identity_of(other, "r").positions


def test_adapter_needs_a_name(plain: LlamaForCausalLM) -> None:
    plain._hf_peft_config_loaded = True
    with pytest.raises(Unsupported, match="adapter"):
        identity_of(plain)
    assert identity_of(plain, adapter="lora@1").adapter == "lora@1"
