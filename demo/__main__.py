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
from pathlib import Path
from typing import Any

from demo.models import ModelUnavailable, recall_dir, smollm2_dir

BEGIN = time.perf_counter()


class Process:
    """A process of the demonstration, its stderr in a file; it ends with `stack`, if not before."""

    def __init__(self, stack: ExitStack, folder: Path, name: str, *command: str) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                cwd=Path(__file__).parents[1],
                env=os.environ | {"KVD_ENDPOINT": f"ipc://{folder}/kvd.sock"},
                start_new_session=True,  # Ctrl-C is answered here, for all of them
            )  # fmt: skip
        stack.callback(self.end, signal.SIGKILL)

    def line(self) -> str:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            sys.exit(f"{self.name} ended early: {self._log.read_text()[-2000:]}")
        return line.strip()

    def tell(self, line: str) -> None:
        assert self._process.stdin
        print(line, file=self._process.stdin, flush=True)

    def end(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        self._process.communicate()


class Demo:
    def __init__(self, stack: ExitStack, model: Path) -> None:
        self.model = model
        self.runs: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self._stack = stack
        self._folder = Path(tempfile.mkdtemp(prefix="kvd-demo-"))
        stack.callback(shutil.rmtree, self._folder)
        self.kvd = self.start_kvd()

    def run(self) -> dict[str, Any]:
        """Everything in turn; the figures for the last line."""
        cold = self.answer("A", "what is a block?", "the first to read the text")
        warm = self.answer("B", "what is a free variable?", "another question about the same text")
        victim = self.start_worker("C", text="objects", question="?", waits_at="prefill")
        victim.line()
        victim.end(signal.SIGKILL)
        say("C: killed (SIGKILL) in the middle layer of its prefill of another text")
        later = self.answer("D", "what are builtins?", "after C was killed in the middle")
        after = self.kill_kvd_under("E", "what is an exception?", "after kvd was killed under it")
        plain = self.compare()
        for run in (warm, later, after):
            self.claim(run["reused"] > 0.8 * len(run["prompt"]), f"{run['name']} reused the text")
        ratio = cold["ttft_s"] / warm["ttft_s"]
        if "smollm2" in self.model.name:  # the other one is too small to wait for
            self.claim(ratio >= 2, "B's first token came in half of A's time")
        return {
            "cold_ttft_s": cold["ttft_s"],
            "warm_ttft_s": warm["ttft_s"],
            "plain_ttft_s": plain["ttft_s"],
            "ratio": ratio,
            "prompt_tokens": len(warm["prompt"]),
            "reused_tokens": warm["reused"],
            "identical_output": all(run["same"] for run in self.runs),
        }

    def kill_kvd_under(self, name: str, question: str, remark: str) -> dict[str, Any]:
        worker = self.start_worker(name, question=question, waits_at="answer")
        worker.line()
        self.kvd.end(signal.SIGKILL)
        say(f"{name}: has five tokens; kvd is killed (SIGKILL) and started again")
        self.kvd = self.start_kvd()
        worker.tell("go on")
        run = self.ended(worker, remark)
        self.claim(run["attempts"] == 2, f"{name} noticed, and began again")
        return run

    def compare(self) -> dict[str, Any]:
        worker = self.start_worker("plain transformers")
        say("every answer is compared with a run without kvd, token by token: a minute")
        worker.tell(json.dumps(self.runs))
        said: dict[str, Any] = json.loads(worker.line())
        for run, same in zip(self.runs, said["verdicts"], strict=True):
            run["same"] = same
            self.claim(same, f"{run['name']} answered as without kvd")
        return said

    def answer(self, name: str, question: str, remark: str) -> dict[str, Any]:
        return self.ended(self.start_worker(name, question=question), remark)

    def ended(self, worker: Process, remark: str) -> dict[str, Any]:
        run: dict[str, Any] = json.loads(worker.line())
        run |= {"name": worker.name, "remark": remark}
        self.runs.append(run)
        found = f"{run['reused']} of {len(run['prompt'])} prompt tokens were there"
        say(
            f"{worker.name}: {found}, first token after {run['ttft_s']:.2f} s: {run['words'][:60]}…"
        )
        return run

    def start_worker(self, name: str, **job: str) -> Process:
        say(f"{name}: loading the model")
        job["model"] = str(self.model)
        return Process(self._stack, self._folder, name, "demo.worker", json.dumps(job))

    def start_kvd(self) -> Process:
        kvd = Process(self._stack, self._folder, "kvd", "kvd")
        say(line := kvd.line())
        # What it keeps in shared memory and on disk outlives it.
        for tier in line.split("; ", 1)[1].split(", "):
            self._stack.callback(shutil.rmtree, tier.rpartition(" in ")[2], ignore_errors=True)
        return kvd

    def claim(self, holds: bool, what: str) -> None:
        self.failed += [] if holds else [what]


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit("interrupted"))
    try:
        model = smollm2_dir(say)
    except ModelUnavailable as error:
        say(f"{error}; going on with a small model that knows ids, no words")
        model = recall_dir(say)
    with ExitStack() as stack:
        demo = Demo(stack, model)
        figures = demo.run()
        demo.kvd.end(signal.SIGTERM)
    print("\n   prompt  found  first token  as without kvd")
    for run in demo.runs:
        row = f"{run['name']}  {len(run['prompt']):6}  {run['reused']:5}  {run['ttft_s']:9.2f} s"
        print(f"{row}  {'yes' if run['same'] else 'NO':14}  {run['remark']}")
    print(f"\nB had its first token {figures['ratio']:.1f} times sooner than A: it attended to the")
    print(f"pages that A had filled. Without kvd, A's takes {figures['plain_ttft_s']:.2f} s.")
    for what in demo.failed:
        print(f"This did not hold: {what}.")
    print(json.dumps(figures), flush=True)
    return 1 if demo.failed else 0


def say(line: str) -> None:
    print(f"[{time.perf_counter() - BEGIN:5.1f} s] {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
