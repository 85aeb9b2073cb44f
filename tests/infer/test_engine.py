"""Engine: each request ends as it would alone, whatever runs beside it and whoever dies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from signal import SIGKILL
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from kvd.testing.daemons import running_daemon
from kvd.testing.faults import Faults, set_faults
from kvd_client import BadRequest, Client, UnknownSequence
from kvd_infer.engine import Engine
from kvd_infer.sampler import SamplingParams
from kvd_infer.scheduler import MATCH_SECONDS, Limits
from kvd_infer.sequence import Request
from tests.e2e.support import eventually
from tests.infer.conftest import PATIENCE_SECONDS, attached
from tests.infer.engines import (
    BLOCK,
    STEPS,
    Heard,
    alone,
    assert_all_given_back,
    assert_as_alone,
    die_on_the_way,
    greedy,
    ids,
    model_of,
    pool,
    reference,
    run,
)
from tests.infer.runs import At

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon
    from kvd_infer.model import Model

RAGGED = (1, 2, 15, 16, 17, 33, 100)


@pytest.fixture
def model(one_thread: None, salt: str) -> Model:
    """Its revision gives it a namespace of the test's own."""
    return model_of(salt)


@pytest.fixture
def client(shared_daemon: RunningDaemon) -> Iterator[Client]:
    with attached(shared_daemon) as client:
        yield client


@pytest.fixture
def small(one_thread: None) -> Iterator[Client]:
    """A client of a daemon with 32 pages."""
    with running_daemon(pool(32)) as daemon, attached(daemon) as client:
        yield client


def drawn(id: str, tokens: tuple[int, ...], n: int = 1) -> Request:
    return Request(id, tokens, SamplingParams(max_tokens=STEPS, seed=7, n=n))


# --- as each alone ---


@pytest.mark.parametrize("step_tokens", [1, 7, 16, 512])
@pytest.mark.parametrize("has_kvd", [True, False])
def test_ragged_batch_is_as_each_alone(
    model: Model, client: Client, step_tokens: int, has_kvd: bool
) -> None:
    requests = [greedy(str(num), ids(num)) for num in RAGGED]
    engine = Engine(model, client if has_kvd else None, limits=Limits(step_tokens))
    assert_as_alone(run(engine, *requests), *requests)


def test_request_that_comes_on_the_way_is_as_alone(model: Model, client: Client) -> None:
    first, second = greedy("first", ids(40)), greedy("second", ids(50))
    engine, heard = Engine(model, client), Heard()
    engine.add(first)
    for _ in range(5):
        heard.take(engine.step())
    engine.add(second)
    while engine.has_work:
        heard.take(engine.step())
    assert_as_alone(heard, first, second)


def test_warm_engine_computes_the_last_token_alone(model: Model, client: Client) -> None:
    request = greedy("one", ids(100))
    run(Engine(model, client), request)
    engine = Engine(model, client)
    heard = run(engine, request)
    assert_as_alone(heard, request)
    assert heard.cached["one/0"] == 99
    assert engine.num_computed == 1 + STEPS - 1


def test_generated_blocks_are_cached_too(model: Model, client: Client) -> None:
    request = greedy("one", ids(30))
    generated = run(Engine(model, client), request).tokens["one/0"]
    heard = run(Engine(model, client), greedy("two", ids(30) + tuple(generated)))
    assert heard.cached["two/0"] == (30 + STEPS) // BLOCK * BLOCK


def test_shared_prefix_of_requests_that_come_together_is_computed_once(
    model: Model, client: Client
) -> None:
    shared = ids(10 * BLOCK)
    requests = [greedy(str(num), shared + ids(5, num), 1) for num in range(4)]
    engine = Engine(model, client, limits=Limits(step_tokens=64))
    assert_as_alone(run(engine, *requests), *requests)
    assert engine.num_computed == 10 * BLOCK + 4 * 5


def test_equal_seeds_draw_equal_tokens_whatever_the_batch(model: Model, client: Client) -> None:
    one = run(Engine(model, client), drawn("one", ids(40))).tokens["one/0"]
    crowd = [greedy(str(num), ids(num)) for num in RAGGED]
    engine = Engine(model, limits=Limits(step_tokens=16))
    assert run(engine, *crowd, drawn("one", ids(40))).tokens["one/0"] == one


def test_end_of_text_ends_a_sequence(model: Model, client: Client) -> None:
    fifth = alone(reference(), ids(40), STEPS)[4]
    params = SamplingParams(max_tokens=STEPS, temperature=0, stop_token_ids=(fifth,))
    heard = run(Engine(model, client), Request("one", ids(40), params))
    expected = alone(reference(), ids(40), STEPS)
    assert heard.tokens["one/0"] == expected[: expected.index(fifth) + 1]
    assert heard.reasons["one/0"] == "stop"


# --- text ---


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each token of the tiny models."""
    words = tokenizers.models.WordLevel({f"w{id}": id for id in range(256)}, unk_token="w0")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))


def test_text_ends_before_a_stop_string(
    model: Model, client: Client, tokenizer: PreTrainedTokenizerFast
) -> None:
    expected = alone(reference(), ids(40), STEPS)
    words = [f"w{id}" for id in expected]
    params = SamplingParams(max_tokens=STEPS, temperature=0, stop=(f"{words[4]} {words[5]}",))
    heard = run(Engine(model, client, tokenizer=tokenizer), Request("one", ids(40), params))
    assert heard.texts["one/0"] == " ".join(words[:4]) + " "
    assert (heard.tokens["one/0"], heard.reasons["one/0"]) == (expected[:6], "stop")


def test_text_of_a_resumed_sequence_is_whole(
    model: Model, client: Client, tokenizer: PreTrainedTokenizerFast
) -> None:
    saving(model, client, drawn("one", ids(40)), 12)
    engine = Engine(model, client, tokenizer=tokenizer)
    engine.resume("one/0")
    heard = run(engine)
    assert heard.texts["one/0"] == " ".join(f"w{id}" for id in heard.tokens["one/0"])


def test_engine_without_a_tokenizer_resumes_none_that_needs_it(
    model: Model, client: Client, tokenizer: PreTrainedTokenizerFast
) -> None:
    first = Engine(model, client, tokenizer=tokenizer, save_every=1)
    first.add(Request("one", ids(40), SamplingParams(max_tokens=STEPS, stop=("none",))))
    first.step()
    with pytest.raises(BadRequest, match="tokenizer"):
        Engine(model, client).resume("one/0")


# --- several samples ---


def test_samples_are_as_each_without_kvd(model: Model, client: Client) -> None:
    """A sample is drawn by seed and number alone, so that rows shared wrongly would show."""
    engine = Engine(model, client)
    forked = run(engine, drawn("one", ids(40), n=4))
    assert engine.num_computed == 40 + 4 * (STEPS - 1)
    assert forked.tokens == run(Engine(model), drawn("one", ids(40), n=4)).tokens
    assert len({tuple(tokens) for tokens in forked.tokens.values()}) == 4


def test_samples_without_a_place_wait_for_one(model: Model, client: Client) -> None:
    engine = Engine(model, client, limits=Limits(sequences=2))
    engine.add(drawn("one", ids(40), n=5))
    heard = Heard()
    while engine.has_work:
        heard.take(engine.step())
        assert len(engine.scheduler.running) <= 2
    assert heard.tokens == run(Engine(model), drawn("one", ids(40), n=5)).tokens


def test_samples_without_a_place_have_their_first_token_with_the_others(
    model: Model, client: Client
) -> None:
    run(Engine(model, client), greedy("before", ids(40)))
    engine, heard = Engine(model, client, limits=Limits(sequences=2)), Heard()
    engine.add(drawn("one", ids(40), n=5))
    heard.take(engine.step())
    assert [len(tokens) for tokens in heard.tokens.values()] == [1, 1, 1, 1, 1]
    assert set(heard.cached.values()) == {39}
    assert engine.num_computed == 1


def test_samples_of_which_the_first_is_over_at_once(model: Model, client: Client) -> None:
    params = SamplingParams(max_tokens=1, seed=7, n=3)
    heard = run(Engine(model, client), Request("one", ids(40), params))
    assert set(heard.reasons.values()) == {"length"}
    assert [len(tokens) for tokens in heard.tokens.values()] == [1, 1, 1]


# --- what ends before its time ---


@pytest.mark.parametrize("num_steps", [0, 1, 3, 10])
def test_cancelled_request_leaves_the_others_as_they_were(
    model: Model, client: Client, num_steps: int
) -> None:
    other = greedy("other", ids(60))
    engine, heard = Engine(model, client, limits=Limits(step_tokens=32)), Heard()
    engine.add(drawn("one", ids(50), n=2))
    engine.add(other)
    for _ in range(num_steps):
        heard.take(engine.step())
    engine.cancel("one")
    while engine.has_work:
        heard.take(engine.step())
    assert_as_alone(heard, other)
    assert heard.reasons == {"one/0": "cancelled", "one/1": "cancelled", "other/0": "length"}
    assert_all_given_back(engine.namespace)


def test_cancel_of_what_is_over_does_nothing(model: Model) -> None:
    engine = Engine(model)
    run(engine, greedy("one", ids(5)))
    engine.cancel("one")
    assert not engine.has_work


def test_request_ends_at_its_deadline(
    model: Model, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, heard = Engine(model, client), Heard()
    engine.add(greedy("one", ids(40), deadline=time.monotonic() + 1000))
    heard.take(engine.step())
    now = time.monotonic()
    monkeypatch.setattr("kvd_infer.engine.time.monotonic", lambda: now + 1001)
    heard.take(engine.step())
    assert heard.reasons == {"one/0": "deadline"}
    assert not engine.has_work


def test_close_ends_all(model: Model, client: Client) -> None:
    engine = Engine(model, client)
    for num in RAGGED:
        engine.add(greedy(str(num), ids(num)))
    engine.step()
    engine.close()
    assert {output.reason for output in engine.step()} == {"cancelled"}
    assert_all_given_back(engine.namespace)


# --- what cannot be ---


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (greedy("one", ()), "at least one token"),
        (greedy("one", (256,)), "below 256"),
        (greedy("one", (-1,)), "below 256"),
        (greedy("one", ids(2040)), "2048 of the model"),
        (Request("one", (1,), SamplingParams(max_tokens=1, stop=("x",))), "tokenizer"),
        (greedy("one", cast("Any", ("x",))), "below 256"),
        (greedy("one", (1,), priority=1 << 63), "priority"),
        (greedy("one", (1,), priority=1 << 64), "ints"),
        (greedy("one", (1,), deadline=math.nan), "the deadline is no number"),
        (greedy("one", (1,), cast("Any", 1.5)), "max_tokens"),
        (Request("one", (1,), SamplingParams(max_tokens=1, top_k=1 << 64)), "ints"),
    ],
)
def test_what_cannot_be_is_refused(model: Model, request_: Request, match: str) -> None:
    engine = Engine(model)
    with pytest.raises(BadRequest, match=match):
        engine.add(request_)
    assert not engine.has_work


def test_second_request_of_one_id_is_refused(model: Model) -> None:
    engine = Engine(model)
    engine.add(greedy("one", ids(5)))
    with pytest.raises(BadRequest, match="under way"):
        engine.add(greedy("one", ids(6)))


def test_request_may_fill_the_model(model: Model, client: Client) -> None:
    request = greedy("one", ids(2048 - 4), 4)
    assert_as_alone(run(Engine(model, client), request), request)


def test_limits_of_nothing_are_refused() -> None:
    with pytest.raises(BadRequest, match="at least one"):
        Limits(step_tokens=0)


# --- pages run short ---


def test_pool_too_small_for_all_changes_nothing(model: Model, small: Client) -> None:
    requests = [greedy(str(num), ids(220, num), 60) for num in range(4)]
    engine = Engine(model, small)
    assert_as_alone(run(engine, *requests), *requests)
    assert engine.scheduler.num_preempted > 0
    assert_all_given_back(engine.namespace)


def test_sequence_alone_goes_on_without_pages(
    model: Model, small: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd_infer.rows.RESERVE_SECONDS", 0.05)
    request = greedy("one", ids(500), 60)
    engine = Engine(model, small)
    assert_as_alone(run(engine, request), request)
    assert run(engine, request).cached["one/0"] < 500
    assert_all_given_back(engine.namespace)


# --- what only a store has ---


@pytest.fixture
def with_disk(model: Model) -> Iterator[tuple[RunningDaemon, Client]]:
    """The daemon has 32 pages, and on a disk alone what follows of ids(160)."""
    document = pool(32)
    disk = {"type": "lmdb", "capacity_bytes": "16MiB", "free_floor_bytes": 0}
    document["tiers"].append({"type": "faulty", "tier": disk})
    with (
        running_daemon(document) as daemon,
        Client(daemon.endpoint, timeout=10 * PATIENCE_SECONDS) as client,
    ):
        for seed, num_tokens in enumerate((160, 450)):
            run(Engine(model, client), greedy("before", ids(num_tokens, seed), 1))
            client.checkpoint()
        yield daemon, client
        set_faults(daemon.data_directory, Faults.NONE)


def test_what_a_store_has_comes_while_a_request_waits(
    model: Model, with_disk: tuple[RunningDaemon, Client]
) -> None:
    _, client = with_disk
    engine = Engine(model, client)
    engine.add(greedy("first", ids(20, 2)))
    engine.step()
    engine.add(greedy("second", ids(160)))
    eventually(lambda: client.status().counters.get("blocks_promoted") == 160 // BLOCK)
    assert run(engine).cached == {"first/0": 0, "second/0": 159}


def test_nobody_waits_long_for_what_a_stuck_store_has(
    model: Model, with_disk: tuple[RunningDaemon, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, client = with_disk
    monkeypatch.setattr("kvd_infer.scheduler.MATCH_SECONDS", MATCH_SECONDS)
    requests = greedy("first", ids(20, 2)), greedy("second", ids(160))
    set_faults(daemon.data_directory, Faults.STUCK)
    heard = run(Engine(model, client), *requests)
    assert_as_alone(heard, *requests)
    assert heard.cached["second/0"] == 0


def test_what_is_urgent_comes_first(model: Model, client: Client) -> None:
    engine, order = Engine(model, client, limits=Limits(sequences=1)), []
    for number, priority in enumerate((0, 5, 1, 5)):
        engine.add(greedy(str(number), ids(20, number), 2, priority=priority))
    while engine.has_work:
        order += [output.request for output in engine.step() if output.reason]
    assert order == ["1", "3", "2", "0"]


def test_pages_are_taken_from_who_matters_least(model: Model, small: Client) -> None:
    engine = Engine(model, small)
    requests = [
        greedy(str(num), ids(220, num), 60, priority=priority)
        for num, priority in enumerate((0, 2, 1))
    ]
    ended = []
    for request in requests:
        engine.add(request)
    while engine.has_work:
        ended += [output.request for output in engine.step() if output.reason]
    assert ended == ["1", "2", "0"]


# --- the daemon goes ---


def at_layer(model: Model, nth: int, do: Callable[[], object]) -> At:
    """Do something in the middle of the n-th step, when half of its rows are written."""
    return At(model._model, 0, nth, do)


@pytest.mark.parametrize("nth", [1, 2, 9])
def test_daemon_restarted_in_a_step_changes_nothing(
    model: Model, daemon: RunningDaemon, nth: int
) -> None:
    requests = [greedy(str(num), ids(num)) for num in RAGGED]
    with attached(daemon) as client:
        hook = at_layer(model, nth, daemon.restart)
        engine = Engine(model, client, limits=Limits(step_tokens=64))
        assert_as_alone(run(engine, *requests), *requests)
        hook.close()
        assert_all_given_back(engine.namespace)


@pytest.mark.parametrize("nth", [1, 2, 9])
def test_daemon_killed_in_a_step_changes_nothing(
    model: Model, daemon: RunningDaemon, nth: int
) -> None:
    requests = [greedy(str(num), ids(num)) for num in RAGGED]
    with attached(daemon) as client:
        hook = at_layer(model, nth, daemon.kill)
        engine = Engine(model, client, limits=Limits(step_tokens=64))
        assert_as_alone(run(engine, *requests), *requests)
        hook.close()


def test_daemon_frozen_in_a_step_changes_nothing(
    model: Model, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd_infer.rows.RESERVE_SECONDS", 0.3)
    requests = [greedy(str(num), ids(num)) for num in RAGGED]
    with Client(daemon.endpoint, timeout=0.3) as client:
        assert client.wait_attached(PATIENCE_SECONDS)
        hook = at_layer(model, 2, daemon.pause)
        engine = Engine(model, client, limits=Limits(step_tokens=64))
        assert_as_alone(run(engine, *requests), *requests)
        hook.close()
        daemon.resume()
        eventually(lambda: client.attached)
        assert_as_alone(run(engine, *requests), *requests)
        assert_all_given_back(engine.namespace)


def test_blocks_dropped_in_a_step_change_nothing(model: Model, client: Client) -> None:
    requests = [greedy(str(num), ids(num)) for num in RAGGED]
    engine = Engine(model, client, limits=Limits(step_tokens=64))
    hook = at_layer(model, 2, engine.namespace.drop)
    assert_as_alone(run(engine, *requests), *requests)
    hook.close()
    assert_all_given_back(engine.namespace)


def test_daemon_restarted_between_two_steps_changes_nothing(
    model: Model, daemon: RunningDaemon
) -> None:
    """All that the scheduler planned is void before anything of it is computed."""
    request = drawn("one", ids(40), n=2)
    with attached(daemon) as client:
        engine, heard = Engine(model, client), Heard()
        engine.add(request)
        for _ in range(3):
            heard.take(engine.step())
            daemon.restart()
        while engine.has_work:
            heard.take(engine.step())
    assert heard.tokens == run(Engine(model), request).tokens


def test_daemon_restarted_before_a_fork_changes_nothing(
    model: Model, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = drawn("one", ids(40), n=3)
    with attached(daemon) as client:
        engine = Engine(model, client)
        followed = engine._followed

        def restart_before(first: object) -> object:
            daemon.restart()
            monkeypatch.setattr(engine, "_followed", followed)
            return followed(first)

        monkeypatch.setattr(engine, "_followed", restart_before)
        heard = run(engine, request)
    assert heard.tokens == run(Engine(model), request).tokens


# --- saved and resumed ---


def saving(model: Model, client: Client, request: Request, num_steps: int) -> Engine:
    """An engine that saves after each fifth token, and did so many steps."""
    engine = Engine(model, client, save_every=5)
    engine.add(request)
    for _ in range(num_steps):
        engine.step()
    return engine


@pytest.mark.parametrize("num_prompt", [1, 16, 40])
def test_resumed_sequence_ends_as_if_nothing_had_been(
    model: Model, client: Client, num_prompt: int
) -> None:
    request = drawn("one", ids(num_prompt))
    saving(model, client, request, 12)
    second = Engine(model, client)
    assert second.resume("one/0") == request
    heard = Heard()
    heard.take(second.step())
    assert len(heard.tokens["one/0"]) == 11
    assert heard.cached["one/0"] == num_prompt
    assert second.num_computed == 1
    while second.has_work:
        heard.take(second.step())
    assert heard.tokens == run(Engine(model), request).tokens
    with pytest.raises(UnknownSequence):  # it is over
        second.resume("one/0")


def test_sequence_of_an_engine_that_was_killed_ends_as_if_it_had_not_been(
    model: Model, client: Client
) -> None:
    request = drawn("one", ids(40))
    arguments = (client.endpoint, model.identity.revision, request, 12)
    process = get_context("spawn").Process(target=die_on_the_way, args=arguments)
    process.start()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == -SIGKILL
    engine = Engine(model, client)
    engine.resume("one/0")
    assert run(engine).tokens == run(Engine(model), request).tokens
    assert engine.num_computed == 14


def test_sequence_that_is_taken_ends_where_it_was(model: Model, client: Client) -> None:
    first = saving(model, client, drawn("one", ids(40)), 12)
    second = Engine(model, client, save_every=5)
    second.resume("one/0")
    heard = Heard()
    while first.has_work:
        heard.take(first.step())
    assert heard.reasons == {"one/0": "taken"}
    assert run(second).reasons == {"one/0": "length"}
    assert_all_given_back(second.namespace)


def test_deadline_goes_on_in_the_second_engine(model: Model, client: Client) -> None:
    deadline = time.monotonic() + 1000
    saving(model, client, greedy("one", ids(40), deadline=deadline), 8)
    resumed = Engine(model, client).resume("one/0")
    assert resumed.deadline == pytest.approx(deadline, abs=100)


def test_resume_of_what_is_under_way_here_is_refused(model: Model, client: Client) -> None:
    request = drawn("one", ids(40))
    first = saving(model, client, request, 12)
    with pytest.raises(BadRequest, match="under way"):
        first.resume("one/0")
    assert run(first).reasons == {"one/0": "length"}


@pytest.mark.parametrize("state", [b"", b"\xc1", msgspec.msgpack.encode({"last": 1})])
def test_resume_of_what_no_engine_saved_is_refused(
    model: Model, client: Client, state: bytes
) -> None:
    engine = Engine(model, client)
    with engine.namespace.match(ids(40), reserve_tokens=40) as lease:
        lease.save("other", ids(32), state)
    with pytest.raises(BadRequest, match="other"):
        engine.resume("other")
    assert not engine.has_work
    assert_all_given_back(engine.namespace)


# What could be, of 32 tokens; the other fields cannot.
FOREIGN = {"params": {"max_tokens": 20}, "num_prompt": 20, "last": 5}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("one/0", {"num_prompt": 0}),
        ("one/0", {"num_prompt": 33}),
        ("one/0", {"last": -1}),
        ("one/0", {"last": 256}),
        ("one/0", {"last": (1 << 64) - 1}),
        ("one/0", {"priority": (1 << 64) - 1}),
        ("one/0", {"deadline": math.nan}),
        ("one/0", {"params": {"max_tokens": 0}}),
        ("one/0", {"params": {"max_tokens": 13}}),
        ("one/0", {"params": {"max_tokens": 1 << 63}}),
        ("one/0", {"params": {"max_tokens": 20, "stop": ["x"]}}),
        ("one", {}),
        ("one/1", {}),
        ("one/-1", {}),
        ("one/00", {}),
        ("one/" + "9" * 40, {}),
    ],
)
def test_resume_of_what_cannot_be_gone_on_with_is_refused(
    model: Model, client: Client, name: str, fields: dict[str, Any]
) -> None:
    engine = Engine(model, client)
    state = {"priority": 0, "deadline": math.inf, **FOREIGN, **fields}
    with engine.namespace.match(ids(40), reserve_tokens=40) as lease:
        lease.save(name, ids(32), msgspec.msgpack.encode(state))
    with pytest.raises(BadRequest, match=f"{name} cannot be gone on with here"):
        engine.resume(name)
    assert_all_given_back(engine.namespace)
    assert run(engine, greedy("two", ids(20))).reasons == {"two/0": "length"}


def test_foreign_sequence_that_can_be_gone_on_with_is(model: Model, client: Client) -> None:
    engine = Engine(model, client)
    state = {"priority": 0, "deadline": math.inf, **FOREIGN}
    with engine.namespace.match(ids(40), reserve_tokens=40) as lease:
        lease.save("one/0", ids(32), msgspec.msgpack.encode(state))
    engine.resume("one/0")
    assert len(run(engine).tokens["one/0"]) == 20


def test_engine_without_kvd_resumes_nothing(model: Model) -> None:
    with pytest.raises(BadRequest, match="client"):
        Engine(model).resume("one/0")


# --- faults of ours ---


def test_a_fault_in_one_sequences_text_ends_that_one_alone(model: Model) -> None:
    engine = Engine(model)
    good, bad = greedy("good", ids(20)), greedy("bad", ids(30))
    engine.add(good)
    engine.add(bad)
    (sequence,) = engine._requests["bad"]
    sequence.text = cast("Any", object())  # nothing can be fed to it
    heard = run(engine)
    assert heard.reasons == {"good/0": "length", "bad/0": "failed"}
    assert_as_alone(heard, good)


def test_an_engine_goes_on_after_a_step_that_raised(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, request = Engine(model), greedy("one", ids(20))
    engine.add(request)

    def fail(*args: object) -> None:
        raise RuntimeError("once")

    with monkeypatch.context() as patch:
        patch.setattr("kvd_infer.engine.next_tokens", fail)
        with pytest.raises(RuntimeError, match="once"):
            engine.step()
    assert_as_alone(run(engine), request)


def test_samples_go_on_after_a_step_that_raised(
    model: Model, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, request = Engine(model, client), drawn("one", ids(20), n=3)
    engine.add(request)

    def fail(*args: object) -> None:
        raise RuntimeError("once")

    with monkeypatch.context() as patch:
        patch.setattr("kvd_infer.engine.next_tokens", fail)
        with pytest.raises(RuntimeError, match="once"):
            engine.step()
    assert run(engine).tokens == run(Engine(model), request).tokens


def test_what_a_sequence_computed_itself_was_not_cached(model: Model, client: Client) -> None:
    engine, request = Engine(model, client, limits=Limits(step_tokens=32)), greedy("one", ids(96))
    engine.add(request)
    engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    assert run(engine).cached == {"one/0": 0}
