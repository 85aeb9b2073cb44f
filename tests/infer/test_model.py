"""Model: families of Hugging Face models, as they are, in one batch of many sequences."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from demo.models import tiny_llama
from kvd_client import BadRequest, Unsupported
from kvd_infer.engine import Engine
from kvd_infer.model import Model
from kvd_infer.scheduler import Limits
from kvd_infer.sequence import Sequence
from tests.infer.conftest import attached, plain_logits, tolerance_of
from tests.infer.engines import assert_as_alone, greedy, ids, model_of, reference, run
from tests.infer.runs import difference, tiny_gpt2, tiny_mistral, tiny_qwen2, tiny_qwen3

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvd.testing.daemons import RunningDaemon
    from kvd_client import Client, Layout

FAMILIES = [tiny_gpt2, tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3]


@pytest.fixture
def client(shared_daemon: RunningDaemon) -> Iterator[Client]:
    with attached(shared_daemon) as client:
        yield client


@pytest.fixture
def model(one_thread: None) -> Model:
    return model_of("r1")


@pytest.mark.parametrize("make", FAMILIES)
def test_family_generates_as_it_does_alone(
    one_thread: None, client: Client, salt: str, make: Callable[[], PreTrainedModel]
) -> None:
    requests = [greedy(str(num), ids(num)) for num in (1, 17, 40, 100)]
    engine = Engine(Model(make(), salt), client, limits=Limits(step_tokens=50))
    assert_as_alone(run(engine, *requests), *requests, plain=make())


def begun(tokens: tuple[int, ...], layout: Layout) -> Sequence:
    sequence = Sequence(greedy("one", tokens), 0, 0)
    sequence.begin(None, layout)
    return sequence


def test_logits_are_those_of_the_model_alone(model: Model) -> None:
    prompts = [ids(num) for num in (1, 40, 17)]
    chunks = [begun(tokens, model.layout).chunk(len(tokens)) for tokens in prompts]
    logits = model.forward(chunks, [0, 2])
    for row, tokens in zip(logits, prompts[::2], strict=True):
        input_ids = torch.tensor([tokens])
        expected = plain_logits(reference(), input_ids)[0, -1]
        assert difference(row, expected) <= 1e-4


@pytest.mark.parametrize("make", FAMILIES)
def test_packed_prefills_and_decodes_are_those_of_each_sequence_alone(
    one_thread: None, make: Callable[[], PreTrainedModel]
) -> None:
    model, plain, prompts = Model(make(), "r1"), make(), [ids(40), ids(23), ids(31, seed=1)]
    sequences = [begun(tokens, model.layout) for tokens in prompts]
    for lengths in ([30, 1, 20], [9, 21, 1], [1, 1, 10]):
        chunks = [each.chunk(count) for each, count in zip(sequences, lengths, strict=True)]
        logits = model.forward(chunks, [0, 1, 2])
        for row, each, count, tokens in zip(logits, sequences, lengths, prompts, strict=True):
            each.written(count)
            input_ids = torch.tensor([tokens[: each.rows.length]])
            assert difference(row, plain_logits(plain, input_ids)[0, -1]) <= 1e-4


def test_logits_behind_computed_rows_are_those_of_the_model_alone(model: Model) -> None:
    sequence, input_ids = begun(ids(100), model.layout), torch.tensor([ids(100)])
    for num_tokens in (30, 1, 69):
        (row,) = model.forward([sequence.chunk(num_tokens)], [0])
        sequence.written(num_tokens)
    tolerance = tolerance_of(reference(), input_ids)
    assert difference(row, plain_logits(reference(), input_ids)[0, -1]) <= tolerance


def test_nobody_s_logits_may_be_wanted(model: Model) -> None:
    sequence = begun(ids(40), model.layout)
    assert model.forward([sequence.chunk(40)], []).shape == (0, 256)


def test_views_are_let_go_of_when_a_step_fails(model: Model) -> None:
    chunk = begun(ids(40), model.layout).chunk(40)
    model._model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.forward([chunk], [0])
    assert (chunk.targets, chunk.parts) == ([], [])


def test_model_that_was_taken_over_has_no_other_use(model: Model) -> None:
    with pytest.raises(Unsupported, match="belongs to an engine"):
        model._model(torch.tensor([ids(5)]))


# --- loaded ---


def test_model_is_loaded_from_a_folder(one_thread: None, tmp_path: Path) -> None:
    tiny_llama(eos_token_id=7).save_pretrained(tmp_path)
    model = Model.load(tmp_path)
    assert (model.max_tokens, model.vocabulary_size, model.end_ids) == (2048, 256, {7})
    request = greedy("one", ids(40))
    assert_as_alone(run(Engine(model), request), request, plain=tiny_llama(eos_token_id=7))


def test_model_in_another_precision_is_another(one_thread: None, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    model = Model.load(tmp_path, torch.bfloat16)
    assert model.layout.dtype == "bfloat16"
    assert model.identity != Model.load(tmp_path).identity
    assert len(run(Engine(model), greedy("one", ids(40))).tokens["one/0"]) == 24


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="safetensors"):
        Model.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with pytest.raises(BadRequest, match="cannot be loaded"):
        Model.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BadRequest, match="cannot be loaded"):
        Model.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[]"),
        ("config.json", {"hidden_act": "x"}),
        ("config.json", {"hidden_size": "wide"}),
        ("config.json", {"num_hidden_layers": -1}),
        ("config.json", {"num_key_value_heads": 0}),
        ("generation_config.json", "[]"),
        ("generation_config.json", {"eos_token_id": [[1]]}),
    ],
)
def test_folder_with_nonsense_is_refused(
    tmp_path: Path, name: str, content: str | dict[str, Any]
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    path = tmp_path / name
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content)
    path.write_text(content)
    with pytest.raises(BadRequest, match="cannot be loaded"):
        Model.load(tmp_path)


def test_folder_that_lacks_weights_is_refused(one_thread: None, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadRequest, match=r"no model\.layers\.1\.mlp\.down_proj"):
        Model.load(tmp_path)


@pytest.mark.parametrize("ends", [(), (3,), (3, 5)])
def test_ends_of_text_are_those_of_the_model(one_thread: None, ends: tuple[int, ...]) -> None:
    said = {(): None, (3,): 3}.get(ends, list(ends))
    assert Model(tiny_llama(eos_token_id=said), "r1").end_ids == frozenset(ends)
