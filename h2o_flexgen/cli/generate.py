"""`run` behind its flags: one `LLM`, one pass over the prompts, answers, report, record."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from h2o_flexgen.cli.answers import AnswerFile, AnswerPrinter, answer_json
from h2o_flexgen.cli.arguments import RunArguments
from h2o_flexgen.cli.planning import let_calibrate, plan_text
from h2o_flexgen.cli.program import print_error, write_json
from h2o_flexgen.cli.progress import RunProgress
from h2o_flexgen.cli.prompts import GivenPrompt, Messages, PromptLike, random_prompts
from h2o_flexgen.config.hardware.profile import misfits
from h2o_flexgen.config.prompt import Prompt
from h2o_flexgen.config.reports.record import RunRecord, eviction_entry
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.limits.plan import Plan
from h2o_flexgen.engine.requests.chat import marked_chat
from h2o_flexgen.errors import UsageError, writing
from h2o_flexgen.pages.reading import Material
from h2o_flexgen.pages.traces import TraceFile
from h2o_flexgen.pages.whole import write_page
from h2o_flexgen.planning.llm import LLM
from h2o_flexgen.planning.planner import predicted_timeline
from h2o_flexgen.reporting.run_report import flexgen_log, run_report
from h2o_flexgen.units import format_bytes

DEFAULT_RANDOM = (512, 4)  # tokens and prompts of FlexGen's default workload
EXIT_SOME_FAILED = 3
_MOST_TOLD = 20  # errors of sequences on stderr; in the answers are all

_Asked = str | Sequence[int] | Prompt | UsageError
"""A prompt for the engine, or why there is none."""


def generate(arguments: RunArguments, every: list[GivenPrompt] | None, answers: AnswerFile | AnswerPrinter) -> int:
    """Runs `every` prompt, random ones for None; returns 0, or 3 where sequences ended in an error."""
    for note in arguments.notes:
        print_error(f"note: {note}")
    given = None if every is None else [each.prompt for each in every]
    with ExitStack() as stack:
        llm = stack.enter_context(LLM(**vars(arguments.engine), hardware=arguments.hardware))
        prompts, sampling = _work(arguments, given, llm)
        params: SamplingParams | list[SamplingParams] = sampling
        if any(each.settings for each in every or ()):
            params = [replace(sampling, **each.settings) for each in every or ()]
        _notes(arguments, llm, given, prompts)
        progress = stack.enter_context(RunProgress(arguments.quiet, len(prompts) * sampling.num_return_sequences))
        llm.on_progress = progress
        let_calibrate(llm, arguments.calibrate, arguments.quiet)

        def on_plan(plan: Plan) -> None:
            if not arguments.quiet:
                print_error(plan_text(plan))
            progress.expect(plan.predicted)

        llm.on_plan = on_plan
        failed = 0
        for output in llm.stream(prompts, params, on_error=arguments.on_error) if prompts else ():
            progress.finished()
            if output.error is not None:
                failed += 1
                if failed <= _MOST_TOLD:
                    print_error(f"prompt {output.index}: {output.error.removeprefix(f'prompt {output.index} ')}")
            prompt = None if given is None else given[output.index]
            told = None if isinstance(prompt, UsageError) else prompt
            answers.write(answer_json(output, told, llm.model.dummy))
        progress.close()
        if progress.packed:
            packed = format_bytes(progress.packed)
            print_error(f"note: {packed} of packed weights stay in {llm.offload_folder} and serve later runs")
        if failed:
            print_error(f"{failed} of {len(prompts) * sampling.num_return_sequences} sequences ended in an error")
        _report(llm, llm.last_record or _nothing_done(llm), arguments)
    return EXIT_SOME_FAILED if failed else 0


def _work(
    arguments: RunArguments, given: list[PromptLike | UsageError] | None, llm: LLM
) -> tuple[Sequence[_Asked], SamplingParams]:
    if given is not None:
        codec, name = llm.model.codec, llm.config.model
        prompts: list[_Asked] = []
        for index, prompt in enumerate(given):
            if not isinstance(prompt, Messages):
                prompts.append(prompt)
                continue
            try:
                prompts.append(marked_chat(codec, name, prompt, prompt.spans, f"prompt {index}", prompt.arguments))
            except UsageError as error:
                if arguments.on_error == "fail":
                    raise
                prompts.append(error)
        return prompts, arguments.sampling
    shape_typed = not llm.config.free_fields >= {"gpu_batch_size", "num_gpu_batches"}
    block = llm.config.fixed_policy.block_size if shape_typed else DEFAULT_RANDOM[1]
    count, length = arguments.num_prompts or block, arguments.prompt_len or _random_length(arguments, llm)
    drawn = random_prompts(count, length, llm.model.spec.vocab_size, arguments.engine.seed)
    with warnings.catch_warnings(action="ignore"):  # of settings without effect, which was said before
        # Work of a known size: random prompts are for measuring, so no sequence may end early.
        return drawn, replace(arguments.sampling, ignore_eos=True)


def _random_length(arguments: RunArguments, llm: LLM) -> int:
    """Tokens of a prompt of which nobody says how long it is: FlexGen's, or as many as the context leaves."""
    return max(1, min(DEFAULT_RANDOM[0], llm.model.spec.max_positions - arguments.sampling.max_new_tokens))


def _notes(
    arguments: RunArguments, llm: LLM, given: list[PromptLike | UsageError] | None, prompts: Sequence[_Asked]
) -> None:
    """Notes on flags whose effect is not the one that the user may expect."""
    config, policy = llm.config, llm.config.fixed_policy
    hardware = arguments.hardware
    for why in () if hardware is None or arguments.quiet else misfits(hardware, llm.model.spec, llm.model.dtype):
        print_error(f"note: {why}")
    if llm.device.type != "cuda" and config.emulate_gpu is None:
        if any(shares["gpu"] for shares in (policy.weights, policy.cache, policy.hidden)):
            print_error("note: this machine has no GPU, so the gpu shares count as cpu")
        if config.gpu_mem is not None:
            print_error("note: this machine has no GPU, so --gpu-mem has no effect")
    if config.revision is not None and llm.model.origin not in ("cache", "hub"):
        print_error(f"note: --revision has no effect on a model from a {llm.model.origin}")
    if given is not None and not prompts:
        print_error(f"{arguments.prompts_file} holds no prompts, so nothing is generated")
    if given is None and arguments.prompt_len is None:
        print_error(
            f"note: no prompts were given, so {len(prompts)} random ones of {_random_length(arguments, llm)} tokens "
            "measure the speed; --prompt TEXT or --prompts FILE for answers"
        )
    if given is not None and llm.model.dummy:
        print_error("note: the weights are random numbers, so no text is shown")
    if given is not None and config.eviction.name != "full" and arguments.sampling.logprobs is not None:
        print_error("note: log-probabilities are those under eviction, not of the full cache")


def _report(llm: LLM, record: RunRecord, arguments: RunArguments) -> None:
    """The report on stderr, the record as `write_json` has it, then the files that were asked for.

    Where there was nothing to do there is nothing to report, and figures of it would only be zeros.
    """
    if not arguments.quiet and record.sequences:
        print_error(run_report(record))
    with ExitStack() as after, suppress(BrokenPipeError):  # whoever reads stdout may have gone
        after.callback(_write_files, llm, record, arguments)
        write_json(record.to_line(), arguments.json)


def _write_files(llm: LLM, record: RunRecord, arguments: RunArguments) -> None:
    if arguments.log_file is not None:
        log = _log_path(arguments.log_file, record)
        with writing(log), log.open("a", encoding="utf-8") as file:
            file.write(flexgen_log(record, llm.model.spec))
    predicted = None if llm.last_plan is None or not llm.config.trace else predicted_timeline(llm.last_plan)
    if (path := arguments.trace_file) is not None:
        with writing(path):
            llm.timeline.write_chrome_trace(path, predicted=predicted)
    scores = None if llm.score_log is None else _scores(llm, record)
    if (path := arguments.scores_file) is not None and scores is not None:
        with writing(path):
            path.write_text(json.dumps(scores) + "\n", encoding="utf-8")
    if arguments.report_file is not None:
        material = Material()
        material.add("this run", record.to_json())
        material.traces.append(TraceFile("this run", llm.timeline, predicted))
        if scores is not None:
            material.add("this run", scores)
        write_page(material, arguments.report_file)
        print_error(f"the page of this run is {arguments.report_file}")


def _scores(llm: LLM, record: RunRecord) -> dict[str, Any]:
    """The recorded scores of the prompts' tokens; without text for random weights, whose ids say nothing."""
    codec = llm.model.codec
    decode = None if codec is None or llm.model.dummy else codec.decode
    return llm.score_log.to_json(record.eviction, decode) if llm.score_log is not None else {}


def _log_path(path: Path, record: RunRecord) -> Path:
    """`path`; for FlexGen's `--log-file auto` a name that says what ran."""
    if str(path) != "auto":
        return path
    policy = record.policy
    shape = f"gbs-{policy['gpu_batch_size']}-ngbs-{policy['num_gpu_batches']}"
    model = Path(record.model).name
    return Path(f"fo-{model}-{shape}-prompt-{record.prompt_len}-gen-{record.gen_len}.log")


def _nothing_done(llm: LLM) -> RunRecord:
    counts = ("prompt_len", "gen_len", "sequences", "prompt_tokens", "generated_tokens", "flops", "kv_bytes")
    none: dict[str, Any] = dict.fromkeys(counts, 0)
    none |= dict.fromkeys(("load_s", "prefill_s", "decode_s", "total_s"), 0.0)
    return RunRecord(
        model=llm.model.spec.name,
        dtype=llm.model.dtype,
        device=llm.device.type,
        weights="dummy" if llm.model.dummy else "checkpoint",
        eviction=eviction_entry(llm.config.eviction.name, []),
        policy=llm.config.fixed_policy.to_json(),
        bytes_moved={},
        bandwidth={},
        peak_bytes=dict.fromkeys(("gpu", "cpu", "disk", "rss")),
        bound=None,
        **none,
    )
