"""`make demo`: a daemon, inference in several processes, and what happens when some are killed.

Exit status 0 only if every claim held. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo.models import ModelUnavailable, recall_dir, smollm2_dir
from demo.worker import Job

ROOT = Path(__file__).parents[1]
QUESTIONS = (
    "In one paragraph: what is a block, and how are names bound in it?",
    "In one paragraph: what happens when a name is not found?",
    "In one paragraph: what is the builtins namespace for?",
    "In one paragraph: how are exceptions related to execution?",
)
MIN_RATIO = 2.0


class DemoFailed(Exception):
    """Raised when a process did not do what it was there for; the message has what it said."""


class Process:
    """A process of the demonstration, its stderr in a file; ended, at the latest, with `stack`."""

    def __init__(self, stack: ExitStack, folder: Path, name: str, *command: str) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
                env=os.environ | {"KVD_ENDPOINT": f"ipc://{folder}/kvd.sock"},
                start_new_session=True,  # Ctrl-C is this process's to answer
            )  # fmt: skip
        stack.callback(self.kill)

    def line(self) -> str:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise DemoFailed(f"{self.name} ended early: {self._log.read_text()[-2000:]}")
        return line

    def until(self, at: str) -> dict[str, Any]:
        """What a worker says when it gets there."""
        while (said := json.loads(self.line()))["at"] != at:
            pass
        return dict(said)

    def tell(self, line: str = "") -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def stop(self) -> None:
        self._process.terminate()
        self._process.communicate()


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    run: dict[str, Any]
    remark: str


class Demo:
    def __init__(self, stack: ExitStack, model: Path) -> None:
        self.stack = stack
        self.model = str(model)
        self.is_real = (model / "tokenizer.json").exists()
        self.folder = Path(tempfile.mkdtemp(prefix="kvd-demo-"))
        stack.callback(shutil.rmtree, self.folder)
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self.start_kvd()

    def start_kvd(self) -> None:
        self.kvd = Process(self.stack, self.folder, "kvd", "kvd")
        line = self.kvd.line().strip()
        say(line)
        # Its files in shared memory outlive a kill -9.
        self.stack.callback(shutil.rmtree, line.rpartition(" in ")[2], ignore_errors=True)

    def worker(self, name: str, **job: Any) -> Process:
        say(f"{name}: loading the model")
        job = asdict(Job(self.model, **job))
        return Process(self.stack, self.folder, name, "demo.worker", json.dumps(job))

    def answer(self, name: str, question: str, remark: str) -> dict[str, Any]:
        return self.ended(self.worker(name, question=question), remark)

    def ended(self, worker: Process, remark: str) -> dict[str, Any]:
        run = worker.until("end")
        worker.stop()
        self.rows.append(Row(worker.name, run, remark))
        say(
            f"{worker.name}: {run['reused']} of {len(run['prompt'])} prompt tokens were there, "
            f"first token after {run['ttft_s']:.2f} s: {run['words'][:70]}…"
        )
        return run

    def claim(self, holds: bool, what: str) -> None:
        if not holds:
            self.failed.append(what)

    def run(self) -> dict[str, Any]:
        cold = self.answer("A", QUESTIONS[0], "the first to read the text")
        warm = self.answer("B", QUESTIONS[1], "another question about the same text")
        ratio = cold["ttft_s"] / warm["ttft_s"]
        self.claim(cold["reused"] == 0, "A began with an empty cache")
        self.claim(warm["reused"] > 0.8 * len(warm["prompt"]), "B reused the text")
        self.claim(ratio >= MIN_RATIO or not self.is_real, f"B was {MIN_RATIO} times as fast")
        self.kill_a_worker()
        self.kill_kvd()
        plain_ttft = self.judge()
        return {
            "cold_ttft_s": round(cold["ttft_s"], 4),
            "warm_ttft_s": round(warm["ttft_s"], 4),
            "plain_ttft_s": round(plain_ttft, 4),
            "ratio": round(ratio, 2),
            "prompt_tokens": len(warm["prompt"]),
            "reused_tokens": warm["reused"],
            "model": Path(self.model).name,
        }

    def kill_a_worker(self) -> None:
        victim = self.worker("C", text="objects", question=QUESTIONS[0], waits_at="prefill")
        victim.until("prefill")
        victim.kill()
        say("C: killed (SIGKILL) in the middle layer of its prefill")
        run = self.answer("D", QUESTIONS[2], "after C was killed in the middle of a prefill")
        self.claim(run["reused"] > 0.8 * len(run["prompt"]), "D reused the text")

    def kill_kvd(self) -> None:
        worker = self.worker("E", question=QUESTIONS[3], waits_at="answer")
        worker.until("answer")
        self.kvd.kill()
        say("E: waits behind its fifth token; kvd is killed (SIGKILL) and started again")
        self.start_kvd()
        worker.tell()
        run = self.ended(worker, "kvd was killed and restarted while it answered")
        self.claim(run["attempts"] == 2, "E noticed, and began again")

    def judge(self) -> float:
        worker = self.worker("plain transformers")
        worker.until("ready")
        say("comparing every answer with a run without kvd, token by token")
        worker.tell(
            json.dumps([{k: row.run[k] for k in ("prompt", "answer")} for row in self.rows])
        )
        said = worker.until("end")
        worker.stop()
        for row, same in zip(self.rows, said["verdicts"], strict=True):
            row.run["same"] = same
            self.claim(same, f"{row.name} answered as without kvd")
        return float(said["ttft_s"])

    def table(self) -> None:
        print(f"\n{'':2}{'prompt':>8}{'found':>8}{'first token':>13}  as without kvd")
        for row in self.rows:
            run = row.run
            print(
                f"{row.name:2}{len(run['prompt']):8}{run['reused']:8}{run['ttft_s']:11.2f} s"
                f"  {'yes' if run['same'] else 'NO':14}  {row.remark}"
            )


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        model = smollm2_dir(say)
    except ModelUnavailable as error:
        say(f"{error}; going on with a small model that reads ids, not text")
        model = recall_dir(say)
    with ExitStack() as stack:
        demo = Demo(stack, model)
        figures = demo.run()
        demo.kvd.stop()
    demo.table()
    print(
        f"\nB had its first token {figures['ratio']} times sooner than A: it attended to the pages "
        f"that A had filled.\nPlain transformers took {figures['plain_ttft_s']:.2f} s for A's. "
        "C and kvd were killed; every other answer is what it would have been."
    )
    for what in demo.failed:
        print(f"This did not hold: {what}.")
    figures["identical_output"] = all(row.run["same"] for row in demo.rows)
    print(json.dumps(figures), flush=True)
    return 1 if demo.failed else 0


def say(line: str) -> None:
    print(f"[{time.perf_counter() - BEGIN:5.1f} s] {line}", flush=True)


BEGIN = time.perf_counter()

if __name__ == "__main__":
    try:
        sys.exit(main())
    except (DemoFailed, KeyboardInterrupt) as error:
        sys.exit(f"the demonstration did not come to its end: {error or 'interrupted'}")
