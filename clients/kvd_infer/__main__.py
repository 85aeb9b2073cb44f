"""The `kvd-infer` command: its arguments.

Exit status 0; 1, with a line on stderr, where something is wrong; 2 for usage; 130 for Ctrl-C, but
for that by which a server stops.
"""

import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

NAME = "kvd-infer"
INTERRUPTED = 130

try:
    import typer

    from kvd import __version__, sdk
    from kvd_client import KvdError
except ModuleNotFoundError as error:
    sys.exit(f"{NAME}: {error}: install kvd[serve]")
except KeyboardInterrupt:
    sys.exit(INTERRUPTED)

app = typer.Typer(
    epilog="Example: kvd-infer serve --model ./SmolLM2-135M-Instruct --port 8000",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        print(f"{NAME} {__version__}")
        raise typer.Exit


@app.callback()
def with_version(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Run a language model whose KV cache is kvd's."""


Model = Annotated[
    Path,
    typer.Option(
        help="A local folder with safetensors and a tokenizer.", exists=True, file_okay=False
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(help="Where kvd listens; by default where clients look.", envvar="KVD_ENDPOINT"),
]
NoKvd = Annotated[bool, typer.Option("--no-kvd", help="Compute everything in this process.")]


@app.command(
    epilog="Example: kvd-infer generate --model ./SmolLM2-135M-Instruct 'The sea is' "
    "--temperature 0"
)
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="[PROMPT]", help="Or - for stdin.")] = "-",
    max_tokens: Annotated[int, typer.Option(help="How long it gets at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="How much chance there is; 0 for none.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest so much.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="The same seed draws the same text again.")
    ] = None,
    endpoint: Endpoint = None,
    no_kvd: NoKvd = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print text and statistics as JSON, at the end.")
    ] = False,
) -> None:
    """Print what follows a prompt, as it is generated, and on stderr how that went.

    Ctrl-C ends it where it stands.
    """
    with _complaints():
        text = sys.stdin.read() if prompt == "-" else prompt
        from kvd_infer import commands
        from kvd_infer.sampler import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed
        )
        with commands.open_model(model, endpoint, not no_kvd) as opened:
            reason = commands.generate(opened, text, params, as_json=as_json)
    if reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


@app.command(epilog="Example: kvd-infer serve --model ./SmolLM2-135M-Instruct --port 8000")
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any.", min=0, max=65535)] = 8000,
    served_name: Annotated[
        str | None, typer.Option(help="What clients call the model; by default its folder's name.")
    ] = None,
    max_requests: Annotated[
        int, typer.Option(help="Refuse others while so many are under way.", min=1)
    ] = 256,
    grace: Annotated[
        float, typer.Option(help="Seconds for requests under way when it is to stop.", min=0)
    ] = 30.0,
    endpoint: Endpoint = None,
    no_kvd: NoKvd = False,
) -> None:
    """Serve a model over HTTP, as clients of OpenAI's API know it, until SIGTERM or Ctrl-C."""
    name = served_name or model.resolve().name
    with _complaints():
        from kvd_infer import commands

        with commands.open_model(model, endpoint, not no_kvd, max_requests) as opened:
            commands.serve(opened, name, host, port, grace)


@contextmanager
def _complaints() -> Iterator[None]:
    """What goes wrong is said in one line; what takes seconds to import is so within."""
    try:
        yield
    except ModuleNotFoundError as error:
        sys.exit(f"{NAME}: {error}: install kvd[serve]")
    except (KvdError, UnicodeError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def main() -> None:
    """Entry point of the `kvd-infer` script."""
    # OpenMP's threads sleep while they wait, or where others want the cores too a step would take
    # ten times as long. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        flush = sdk.start(NAME)
        try:
            app(prog_name=NAME)
        finally:
            flush(math.inf)
    except OSError as error:  # as of a full disk, where the output goes
        sys.exit(f"{NAME}: {error}")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
