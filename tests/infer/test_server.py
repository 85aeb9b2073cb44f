"""A server of OpenAI's API answers its own client as the model would, and outlives its callers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from itertools import islice
from pathlib import Path
from signal import SIGINT, SIGTERM
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import openai
import pytest

from kvd.testing.daemons import running_daemon
from kvd_infer import commands
from kvd_infer.server import messages
from kvd_infer.server.app import Service
from kvd_infer.server.run import Server, listen
from tests.e2e.support import eventually
from tests.infer.conftest import SETTINGS, attached
from tests.infer.servers import (
    NAME,
    PATIENCE_SECONDS,
    PROMPT,
    ids_of,
    plain_text,
    running_servers,
)

if TYPE_CHECKING:
    from openai.types import Completion

    from kvd.testing.daemons import RunningDaemon
    from tests.infer.servers import RunningServer

NUM_TOKENS = 24
CHAT: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
CHAT_TEXT = f"system: Be brief.\nuser: {PROMPT}\nassistant:"
GREEDY: dict[str, Any] = {"model": NAME, "max_tokens": NUM_TOKENS, "temperature": 0}
# Of what somebody ends before its time.
MANY_TOKENS = 1900
NO_END = {"ignore_eos": True}


@pytest.fixture(scope="module")
def kvd() -> Iterator[RunningDaemon]:
    with running_daemon(SETTINGS) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def servers(
    tiny_dir: Path, kvd: RunningDaemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[RunningServer]]:
    """Two, with one kvd behind them."""
    options = ["--endpoint", kvd.endpoint]
    with running_servers(tiny_dir, tmp_path_factory.mktemp("logs"), options, options) as servers:
        yield servers
        assert not any("Traceback" in server.log for server in servers)


@pytest.fixture
def server(servers: list[RunningServer]) -> RunningServer:
    return servers[0]


@pytest.fixture(scope="module")
def expected(tiny_dir: Path) -> str:
    """What follows PROMPT without kvd and without a server."""
    return plain_text(tiny_dir, PROMPT, NUM_TOKENS)


def completed(server: RunningServer) -> str:
    return server.openai.completions.create(**GREEDY, prompt=PROMPT).choices[0].text


def begun(
    server: RunningServer, max_tokens: int = MANY_TOKENS
) -> tuple[openai.Stream[Completion], str]:
    """A completion of PROMPT on its way, and the text of its first piece."""
    asked: dict[str, Any] = GREEDY | {"prompt": PROMPT, "max_tokens": max_tokens}
    stream = server.openai.completions.create(**asked, stream=True, extra_body=NO_END)
    return stream, next(stream).choices[0].text


# --- answers ---


def test_a_completion_is_what_the_model_generates(server: RunningServer, expected: str) -> None:
    answer = server.openai.completions.create(**GREEDY, prompt=PROMPT)
    assert [(each.text, each.finish_reason) for each in answer.choices] == [(expected, "length")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (50, NUM_TOKENS)


def test_a_chat_is_written_as_the_template_has_it(server: RunningServer, tiny_dir: Path) -> None:
    answer = server.openai.chat.completions.create(**GREEDY, messages=CHAT)
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert message.content == plain_text(tiny_dir, CHAT_TEXT, NUM_TOKENS)


def test_the_pieces_of_a_stream_join_to_the_whole(server: RunningServer, expected: str) -> None:
    chunks = list(server.openai.completions.create(**GREEDY, prompt=PROMPT, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert len(chunks) > 1


def test_a_streamed_chat_says_who_speaks_and_what_it_took(server: RunningServer) -> None:
    whole = server.openai.chat.completions.create(**GREEDY, messages=CHAT)
    stream = server.openai.chat.completions.create(
        **GREEDY, messages=CHAT, stream=True, stream_options={"include_usage": True}
    )
    first, *chunks, last = stream
    assert first.choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.choices[0].message.content
    assert (last.choices, last.usage.completion_tokens) == ([], NUM_TOKENS)


def test_a_server_has_what_another_one_computed(servers: list[RunningServer]) -> None:
    prompt = "Written once, and then read by another process. " * 3
    answers = [each.openai.completions.create(**GREEDY, prompt=prompt) for each in servers]
    first, second = (each.usage.prompt_tokens_details.cached_tokens for each in answers)
    assert (first, second) == (0, len(prompt) - 1)
    assert answers[0].choices[0].text == answers[1].choices[0].text


@pytest.mark.parametrize("as_ids", [False, True], ids=["texts", "ids"])
def test_several_prompts_have_their_choices_in_order(
    server: RunningServer, expected: str, as_ids: bool
) -> None:
    texts = [PROMPT, "Another one"]
    prompts: Any = list(map(ids_of, texts)) if as_ids else texts
    answer = server.openai.completions.create(**GREEDY, prompt=prompts, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices[:2]] == [expected, expected]
    assert answer.choices[2].text == answer.choices[3].text != expected


def test_a_prompt_that_cannot_be_keeps_those_beside_it_from_being_begun(
    server: RunningServer,
) -> None:
    prompts: Any = [PROMPT, PROMPT, "x" * 3000]
    with pytest.raises(openai.BadRequestError, match="2048 of the model"):
        server.openai.completions.create(**GREEDY, prompt=prompts)
    assert server.health["requests"] == 0


def test_a_cached_prompt_counts_once_for_all_its_choices(server: RunningServer) -> None:
    prompt = "It is asked for three answers, and read but once."
    answers = [server.openai.completions.create(**GREEDY, prompt=prompt, n=3) for _ in range(2)]
    first, second = (answer.usage.prompt_tokens_details.cached_tokens for answer in answers)
    assert (first, second) == (0, len(prompt) - 1)


def test_a_prompt_may_be_ids(server: RunningServer, expected: str) -> None:
    answer = server.openai.completions.create(**GREEDY, prompt=ids_of(PROMPT))
    assert answer.choices[0].text == expected


def test_a_seed_draws_the_same_again(server: RunningServer) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "seed": 7, "n": 2}
    once, again = (server.openai.completions.create(**asked).choices for _ in range(2))
    assert [choice.text for choice in once] == [choice.text for choice in again]
    assert once[0].text != once[1].text


def test_an_answer_ends_before_a_stop_string(server: RunningServer, expected: str) -> None:
    stop = expected[8:10]
    answer = server.openai.completions.create(**GREEDY, prompt=PROMPT, stop=[stop, "nowhere"])
    assert answer.choices[0].text == expected[: expected.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_a_long_stop_string_holds_nothing_up(server: RunningServer, expected: str) -> None:
    answer = server.openai.completions.create(**GREEDY, prompt=PROMPT, stop="x" * 1_000_000)
    assert answer.choices[0].text == expected


def test_logprobs_of_a_completion_tell_of_each_token(server: RunningServer) -> None:
    answer = server.openai.completions.create(**GREEDY, prompt=PROMPT, logprobs=2)
    told = answer.choices[0].logprobs
    assert told is not None
    assert len(told.tokens) == len(told.text_offset) == NUM_TOKENS
    for logprob, likeliest in zip(told.token_logprobs, told.top_logprobs, strict=True):
        assert logprob == max(likeliest.values()) <= 0


def test_logprobs_of_a_chat_have_the_likeliest_first(server: RunningServer) -> None:
    stream = server.openai.chat.completions.create(
        **GREEDY, messages=CHAT, logprobs=True, top_logprobs=3, stream=True
    )
    told = [chunk.choices[0].logprobs for chunk in stream]
    tokens = [token for each in told if each for token in each.content]
    assert len(tokens) == NUM_TOKENS
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob


def test_what_the_engine_has_of_its_own_is_asked_as_extras(
    server: RunningServer, expected: str
) -> None:
    asked: dict[str, Any] = GREEDY | {"temperature": 1, "prompt": PROMPT}
    answer = server.openai.completions.create(**asked, extra_body={"top_k": 1, "priority": 3})
    assert answer.choices[0].text == expected
    penalty = {"top_k": 1, "repetition_penalty": 1.7}
    assert server.openai.completions.create(**asked, extra_body=penalty).choices[0].text != expected


def test_the_model_is_listed(server: RunningServer) -> None:
    assert [model.id for model in server.openai.models.list()] == [NAME]
    assert server.openai.models.retrieve(NAME).owned_by == "kvd"


@pytest.mark.real_model
@pytest.mark.slow
def test_a_real_model_knows_an_answer(smollm2_dir: Path, tmp_path: Path) -> None:
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    with running_servers(smollm2_dir, tmp_path, ["--no-kvd"]) as [server]:
        answer = server.openai.chat.completions.create(**GREEDY, messages=question)
    assert "Paris" in (answer.choices[0].message.content or "")


# --- what is refused ---


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 3),
        ("echo", True),
        ("frequency_penalty", 0.5),
        ("logit_bias", {"5": 1}),
        ("logprobs", 99),
        ("max_tokens", 0),
        ("max_tokens", 4000),
        ("n", 0),
        ("n", 1000),
        ("prompt", [[1, 99999]]),
        ("prompt", ["text", 5]),
        ("priority", 1 << 63),
        ("prompt", []),
        ("seed", -1),
        ("stop", [""]),
        ("suffix", "the end"),
        ("temperature", -1),
        ("temperature", 1e300),
        ("temperature", "hot"),
        ("temprature", 0),
        ("top_k", -1),
        ("top_p", 1.5),
    ],
)
def test_what_cannot_be_is_refused_by_name(server: RunningServer, name: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=name) as refusal:
        server.openai.completions.create(**GREEDY | {"prompt": PROMPT}, extra_body={name: value})
    assert refusal.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("content", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("messages", []),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function", "function": {"name": "look"}}]),
        ("top_logprobs", 2),
    ],
)
def test_chats_that_cannot_be_are_refused(server: RunningServer, name: str, value: Any) -> None:
    field = "messages" if name == "content" else name
    with pytest.raises(openai.BadRequestError, match=name):
        server.openai.chat.completions.create(**GREEDY, messages=CHAT, extra_body={field: value})


def test_what_asks_for_nothing_is_allowed(server: RunningServer, expected: str) -> None:
    nothing = {
        "best_of": 1,
        "echo": False,
        "frequency_penalty": 0,
        "logit_bias": None,
        "user": "me",
    }
    answer = server.openai.completions.create(**GREEDY, prompt=PROMPT, extra_body=nothing)
    assert answer.choices[0].text == expected


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"model": "\xff"}', b"[" * 100_000])
def test_a_body_that_is_no_request_is_refused(server: RunningServer, body: bytes) -> None:
    reply = server.http.post("/v1/completions", content=body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_body_that_is_too_long_is_refused(server: RunningServer) -> None:
    assert server.http.post("/v1/completions", content=b" " * (9 << 20)).status_code == 413


def test_another_model_is_not_found(server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model other here, but tiny"):
        server.openai.completions.create(**GREEDY | {"model": "other"}, prompt=PROMPT)
    assert server.http.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"


# --- clients that go, kvds that go, servers that go ---


def test_a_stream_that_nobody_reads_any_more_ends(
    server: RunningServer, kvd: RunningDaemon
) -> None:
    stream, _ = begun(server)
    assert server.health["requests"] == 1
    with attached(kvd) as client:
        assert len(client.leases().leases) == 1
        stream.close()
        eventually(lambda: server.health["requests"] == 0)
        eventually(lambda: not client.leases().leases)


def test_a_request_that_nobody_waits_for_ends(server: RunningServer) -> None:
    body = GREEDY | {"prompt": PROMPT, "max_tokens": MANY_TOKENS} | NO_END
    with closing(HTTPConnection(server.http.base_url.netloc.decode())) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body))
        eventually(lambda: server.health["requests"] == 1)
    eventually(lambda: server.health["requests"] == 0)


def test_who_never_reads_gives_up_his_place(
    tiny_dir: Path,
    one_thread: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("kvd_infer.server.app.READ_SECONDS", 0.05)
    body = GREEDY | {"prompt": PROMPT, "max_tokens": MANY_TOKENS, "stream": True, "logprobs": 20}
    with (
        commands.open_model(tiny_dir, None, uses_kvd=False) as opened,
        serving(opened) as port,
        closing(HTTPConnection("127.0.0.1", port)) as connection,
    ):
        connection.request("POST", "/v1/completions", json.dumps(body | NO_END))
        eventually(lambda: opened.router.num_requests == 1)
        eventually(lambda: opened.router.num_requests == 0)
    assert "reason=unread" in caplog.text


@contextmanager
def serving(opened: commands.Opened) -> Iterator[int]:
    """A server in this process; its port."""
    service = Service(opened.router, opened.prompts, NAME, opened.model.max_tokens, None)
    server = Server(service, opened.router, grace=0)
    with listen("127.0.0.1", 0) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # soon full
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.handle_exit(SIGTERM, None)
            thread.join()


def test_what_takes_long_to_read_keeps_nobody_waiting(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, go_on = Event(), Event()

    def read(*args: Any) -> Any:
        is_asked.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return messages.read(*args)

    monkeypatch.setattr("kvd_infer.server.app.read", read)
    with (
        commands.open_model(tiny_dir, None, uses_kvd=False) as opened,
        serving(opened) as port,
        closing(HTTPConnection("127.0.0.1", port)) as asking,
        closing(HTTPConnection("127.0.0.1", port)) as other,
    ):
        asking.request("POST", "/v1/completions", json.dumps(GREEDY | {"prompt": PROMPT}))
        assert is_asked.wait(PATIENCE_SECONDS)
        other.request("GET", "/health")
        assert other.getresponse().status == 200
        go_on.set()
        assert asking.getresponse().status == 200


def test_requests_go_on_while_kvd_is_restarted(
    servers: list[RunningServer], kvd: RunningDaemon, expected: str
) -> None:
    stream, text = begun(servers[0])
    kvd.kill()
    pieces = islice(stream, 2 * NUM_TOKENS)
    assert (text + "".join(piece.choices[0].text for piece in pieces)).startswith(expected)
    stream.close()
    assert completed(servers[1]) == expected
    kvd.start()
    for server in servers:
        eventually(lambda server=server: server.health["kvd"] == "attached")
        assert completed(server) == expected


def test_what_is_under_way_is_ended_by_grace(tiny_dir: Path, tmp_path: Path) -> None:
    options = ["--no-kvd", "--max-requests", "2", "--grace", "600"]
    with running_servers(tiny_dir, tmp_path, options) as [server]:
        streams = [begun(server, max_tokens=800) for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as refusal:
            completed(server)
        assert refusal.value.response.headers["Retry-After"] == "1"
        server.signal(SIGTERM)
        eventually(lambda: not server.health["ready"])
        with pytest.raises(openai.InternalServerError, match="is being closed"):
            completed(server)
        for stream, _ in streams:
            assert list(stream)[-1].choices[0].finish_reason == "length"


def test_a_second_signal_ends_what_is_under_way(tiny_dir: Path, tmp_path: Path) -> None:
    with running_servers(tiny_dir, tmp_path, ["--no-kvd", "--grace", "600"]) as [server]:
        stream, _ = begun(server)
        server.signal(SIGTERM)
        eventually(lambda: not server.health["ready"])
        server.signal(SIGINT)
        with pytest.raises(openai.APIError, match="cancelled"):
            list(stream)
