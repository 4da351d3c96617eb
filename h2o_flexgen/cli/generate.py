"""`run` behind its flags: one `LLM`, one pass over the prompts, answers, report, record."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from h2o_flexgen.cli.answers import AnswerFile, answer_json, print_answer
from h2o_flexgen.cli.arguments import RunArguments
from h2o_flexgen.cli.program import print_error
from h2o_flexgen.cli.prompts import demo_prompts, random_prompts, read_prompts
from h2o_flexgen.config.record import RunRecord
from h2o_flexgen.engine.llm import LLM
from h2o_flexgen.engine.requests import Prompt
from h2o_flexgen.engine.sequence import RequestOutput
from h2o_flexgen.errors import UsageError
from h2o_flexgen.reporting.flexgen_log import flexgen_log
from h2o_flexgen.reporting.run_report import run_report

DEFAULT_RANDOM = (512, 4)  # tokens and prompts of FlexGen's default workload


class _Bars:
    """Progress on stderr; nothing where that is no terminal or quiet was asked for."""

    def __init__(self, quiet: bool) -> None:
        self._off = quiet or not sys.stderr.isatty()
        self._bar: tqdm[None] | None = None
        self._what = ""

    def loading(self, what: str, done: int, total: int) -> None:
        if self._bar is None or self._what != what:
            self.close()
            self._what = what
            self._bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=self._off, leave=False)
        self._bar.update(done - self._bar.n)

    def sequences(self, total: int) -> tqdm[None]:
        self.close()
        self._bar = tqdm(total=total, desc="generating", unit="seq", disable=self._off)
        return self._bar

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def generate(arguments: RunArguments) -> int:
    """Runs; returns 0, or 3 where sequences ended in an error."""
    bars = _Bars(arguments.quiet)
    with ExitStack() as stack:
        stack.callback(bars.close)
        texts = _texts(arguments)
        answers = (
            None if arguments.output is None else stack.enter_context(AnswerFile(arguments.output, arguments.overwrite))
        )
        llm = stack.enter_context(LLM(**_settings(arguments)))
        if arguments.notes and llm.device.type != "cuda" and arguments.engine.emulate_gpu is None:
            print_error("note: no GPU here, so the gpu shares of --percent count as cpu")
        llm.on_progress = bars.loading
        prompts, sampling = _prompts(arguments, texts, llm)
        failed = 0
        if prompts:
            bar = bars.sequences(len(prompts) * sampling.num_return_sequences)
            for output in llm.stream(prompts, sampling):
                bar.update()
                failed += output.finish_reason == "error"
                _give(output, texts, answers, bar)
        if llm.last_record is not None:
            _report(llm, llm.last_record, arguments)
    return 3 if failed else 0


def _settings(arguments: RunArguments) -> dict[str, object]:
    engine = arguments.engine
    return {name: getattr(engine, name) for name in engine.__dataclass_fields__}


def _texts(arguments: RunArguments) -> list[str] | None:
    """The prompts as text, None where random ones are wanted."""
    sources = [bool(arguments.prompts), arguments.prompts_file is not None, arguments.prompt_len is not None]
    if sum(sources) > 1:
        raise UsageError("--prompt, --prompts and --prompt-len are given together", "needed one of them")
    if arguments.prompts:
        return list(arguments.prompts)
    if arguments.prompts_file is not None:
        return read_prompts(arguments.prompts_file)
    if arguments.prompt_len is None and arguments.engine.model == "demo" and arguments.engine.weights == "checkpoint":
        return demo_prompts()
    return None


def _prompts(arguments: RunArguments, texts: list[str] | None, llm: LLM) -> tuple[Sequence[Prompt], object]:
    if texts is not None:
        return texts, arguments.sampling
    policy = llm.config.fixed_policy
    count = arguments.num_prompts or (policy.block_size if policy.block_size > 1 else DEFAULT_RANDOM[1])
    length = arguments.prompt_len or DEFAULT_RANDOM[0]
    prompts = random_prompts(count, length, llm.model.spec.vocab_size, arguments.engine.seed)
    # Work of a known size: random prompts are for measuring, so no sequence may end early.
    return prompts, replace(arguments.sampling, ignore_eos=True)


def _give(output: RequestOutput, texts: list[str] | None, answers: AnswerFile | None, bar: tqdm[None]) -> None:
    prompt = None if texts is None else texts[output.index]
    if output.error is not None:
        print_error(f"prompt {output.index}: {output.error}")
    if answers is not None:
        answers.write(answer_json(output, prompt))
    else:
        bar.clear()
        print_answer(output, prompt)


def _report(llm: LLM, record: RunRecord, arguments: RunArguments) -> None:
    if not arguments.quiet:
        print_error(run_report(record))
    if arguments.log_file is not None:
        _write_text(arguments.log_file, flexgen_log(record, llm.model.spec))
    if arguments.trace_file is not None:
        llm.timeline.write_chrome_trace(arguments.trace_file)
    sys.stdout.write(record.to_line() + "\n")
    sys.stdout.flush()


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--log-file {path}: {error.strerror}", "needed a file that can be written") from None
