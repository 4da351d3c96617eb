"""`Engine`: a model, a machine's limits and a planner in, text out."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from os import PathLike
from threading import Lock
from typing import Any, NoReturn

import torch

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.prefix_store import PrefixStore
from h2o_flexgen.config.checks import one_of
from h2o_flexgen.config.engine import PREFIX_DISK, PREFIX_MEM, EngineConfig
from h2o_flexgen.config.reports.record import RunRecord
from h2o_flexgen.config.sampling import SamplingLike, SamplingParams
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.engine.batching.scheduler import LateRows, Newcomers, WaitingQueue, in_order, note_returns
from h2o_flexgen.engine.execution.block import BlockRunner
from h2o_flexgen.engine.far_heads import know_far_heads
from h2o_flexgen.engine.limits import devices
from h2o_flexgen.engine.limits.plan import OomRetry, Plan, Planner, by_rule, forget, keeping
from h2o_flexgen.engine.metrics.recorder import RunMetrics, make_record
from h2o_flexgen.engine.metrics.trace import ScoreLog, Trace
from h2o_flexgen.engine.model import Model, decoder_of, for_model, open_model
from h2o_flexgen.engine.requests.chat import Conversation, chat_prompts
from h2o_flexgen.engine.requests.grammars import Grammars
from h2o_flexgen.engine.requests.reader import PromptLike, RefusedPrompt, Request, RequestReader, workload_of
from h2o_flexgen.engine.requests.sequence import RequestOutput, Score, Sequence
from h2o_flexgen.engine.requests.tokenizer import text_of
from h2o_flexgen.engine.sampling.hf_generate import Generator
from h2o_flexgen.engine.sampling.sampler import Sampler
from h2o_flexgen.engine.state.loader import Loaded, Progress, bytes_on_disk, load
from h2o_flexgen.errors import PlanError, UsageError
from h2o_flexgen.folders import Closing, expanded
from h2o_flexgen.kernels.native import library, must_compile
from h2o_flexgen.kernels.prompt import by_triton
from h2o_flexgen.schedule.request import Caps, PlanRequest
from h2o_flexgen.schedule.timeline import Timeline
from h2o_flexgen.schedule.work import CountedWork

_SKIP = 'to run the others nevertheless: --on-error skip, on_error="skip"'
ON_ERROR = ("fail", "skip")
"""For a prompt that cannot be run: the call ends before any work, or the prompt's outputs carry the error."""


class CallGuard:
    """One call of an engine at a time, as calls share the streamed weights, and a plan may place all weights anew."""

    def __init__(self) -> None:
        self._lock, self._closed = Lock(), False
        self._process = os.getpid()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within, the engine belongs to this call: another one gets a UsageError, and all do once it is closed."""
        if self._closed:
            raise UsageError("this engine is closed", change="make another LLM")
        if os.getpid() != self._process:
            found = "this engine is that of the process that this one was forked from"
            raise UsageError(found, "its threads and files stayed there", "make an LLM in this process")
        if not self._lock.acquire(blocking=False):
            found, change = "a call or stream of this engine is still under way", "finish it or close() it first"
            raise UsageError(found, "needed one at a time", f"{change}, or use another LLM")
        try:
            yield
        except Exception as error:
            if self._closed:
                raise UsageError("this engine was closed before a call had ended", change="make another LLM") from error
            raise
        finally:
            self._lock.release()

    def close(self) -> None:
        self._closed = True


def _work_of(rows: Collection[Sequence]) -> Counter[str]:
    """The sums of prompt tokens and of steps over sequences."""
    return Counter(prompts=sum(len(row.prompt_ids) for row in rows), steps=sum(row.steps for row in rows))


class Engine(Closing):
    """An offline engine. A context manager: `close` stops its threads and removes its files.

    `settings` are the fields of EngineConfig by name; `planner` decides what the policy leaves open. The first call
    places the weights; a later call whose plan differs places them anew. Not thread safe.
    """

    @devices.plain_torch()
    def __init__(self, model: str | PathLike[str] = "demo", *, planner: Planner = by_rule, **settings: Any) -> None:
        devices.require_threads()
        self._peak_before = devices.peak_rss()
        self.config = EngineConfig.of(model, **settings)
        self.offload_folder = devices.offload_folder(self.config.offload_dir).absolute()
        """The folder of packed weights and the disk tier, wherever the process goes."""
        self.device = devices.resolve_device(self.config)
        self._devices = devices.resolve_devices(self.config, self.device)
        self.model: Model = open_model(self.config, self.device, Engine)
        try:
            know_far_heads(self.config, self.model, self._compute_tier(), Engine)
            self.config = for_model(self.config, self.model.spec, self._compute_tier())
        except BaseException:  # Ctrl-C as well, while heads are measured
            self.model.source.close()
            raise
        self.last_record: RunRecord | None = None
        self.last_plan: Plan | None = None
        self.last_work = CountedWork()
        self.on_progress: Progress | None = None
        """Called with "compiling kernels", "measuring inputs", "loading weights" and "packing weights" (bytes),
        "prefill" (prompt tokens, after each unit), "generating" (new tokens, before each step)."""
        self.planner = planner
        self.on_plan: Callable[[Plan], None] | None = None
        """Called with each plan before it is carried out."""
        self.late: LateRows | None = None
        """The source of sequences that arrive during `run`."""
        self._loaded: Loaded | None = None
        self._grammars = Grammars(self.model.codec, self.model.spec.vocab_size)
        self._retry, self._guard = OomRetry(), CallGuard()
        self._recalled = Counter[str]()  # bytes that recall has read, and the most that it might have
        self._decoder = decoder_of(self.model.spec, self.model.stored, self.model.dtype, self.device)
        self._pins = devices.open_gpu(self._devices)
        self._trace = Trace(self.config.trace, () if self._pins is None else self._pins.devices)
        self.score_log = ScoreLog(self.model.spec) if self.config.record_scores else None
        """Scores and kept tokens of the last call, with record_scores=True."""
        self.prefixes = self._open_prefixes()
        """Stored keys and values of prefixes, with prefix_mem or prefix_dir."""
        # Memory of other engines is counted when a plan is made, since it changes.
        self._baseline = max(0, devices.before_placement() - devices.held_bytes())

    def __reduce__(self) -> NoReturn:
        found, needed = "an LLM cannot be pickled or copied", "its weights, threads and files are this process's"
        raise UsageError(found, needed, "make one in each process")

    def generate(
        self,
        prompts: SequenceOf[PromptLike | UsageError],
        params: SamplingLike | SequenceOf[SamplingLike] | None = None,
        *,
        on_error: str = "fail",
        **settings: Any,
    ) -> list[RequestOutput]:
        """Completes `prompts` (strings or lists of token ids, or a Prompt of either with spans), in order, with
        num_return_sequences outputs each.

        params: a dict of fields counts as SamplingParams. settings: such fields, before those of `params`. UsageError
        before any work for a prompt that cannot be run; with `on_error` "skip" its outputs carry the `error`, and the
        others are run.
        """
        outputs = list(self.stream(prompts, params, on_error=on_error, **settings))
        return sorted(outputs, key=lambda output: (output.index, output.sample))

    def stream(
        self,
        prompts: SequenceOf[PromptLike | UsageError],
        params: SamplingLike | SequenceOf[SamplingLike] | None = None,
        *,
        on_error: str = "fail",
        **settings: Any,
    ) -> Iterator[RequestOutput]:
        """As `generate`, but yields each sequence as soon as it is finished, after those of skipped prompts. Until the
        stream ends or is closed, other calls raise UsageError."""
        if params is None or isinstance(params, Mapping):
            params = SamplingParams.read({**(params or {}), **settings}, "params")
        elif settings:
            if not isinstance(params, SamplingParams):
                raise UsageError("settings by name are given beside a list of SamplingParams", "needed one of the two")
            params = replace(params, **settings)
        one_of(on_error, "on_error", ON_ERROR)
        refused: list[RefusedPrompt] | None = [] if on_error == "skip" else None
        rows = self._reader().read(prompts, params, refused, _SKIP)
        if refused is not None and rows:
            rows = self._fitting(rows, refused)
        empty = None if self.model.dummy or self.model.codec is None else ""
        for each in refused or ():
            for sample in range(each.samples):
                yield RequestOutput.refused(each.place, sample, each.error, empty)
        for row in self._run(rows):
            yield self._output(row)

    def read(self, request: Request) -> list[Sequence]:
        """The sequences of a request, for `run`; none if there is nothing to compute. UsageError if it cannot be run, a
        ContextLengthError for its length."""
        return self._reader().read_one(request)

    def run(self, rows: list[Sequence]) -> Iterator[tuple[Sequence, RequestOutput]]:
        """Runs the sequences of one or more requests from `read`; yields each with its result as soon as it is
        finished. Sequences of `late` take the places of finished ones meanwhile, and their results go there."""
        late, given = self.late, [rows]
        del rows  # as in the call below
        try:
            for row in self._run(given.pop(), late):
                output = self._output(row)
                if late is None or not late.finished(row, output):
                    yield row, output
        finally:
            if late is not None:
                late.again()

    def chat(
        self,
        conversations: SequenceOf[Conversation],
        params: SamplingLike | SequenceOf[SamplingLike] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        on_error: str = "fail",
        **settings: Any,
    ) -> list[RequestOutput]:
        """The model's answers, by its chat template: to strings, or lists of {"role": ..., "content": ...} messages.

        An answer ends with the model's and the template's end tokens, unless `eos_token_id` is given. Otherwise as
        `generate`. chat_template_kwargs: arguments of the template (enable_thinking). UsageError for a model without a
        template, and for messages that do not suit it.
        """
        skip = on_error == "skip"
        prompts = chat_prompts(self.model.codec, self.config.model, conversations, chat_template_kwargs, skip=skip)
        return self.generate(prompts, params, on_error=on_error, **settings)

    def score(self, pairs: Iterable[tuple[PromptLike, PromptLike]]) -> list[Score]:
        """Log-probability of each continuation after its context, with eviction active while scoring.

        The context is prefilled and pruned, the continuation decoded as given; its length counts as gen_len. A pair
        that fails has its `error`, and no log-probability.
        """
        rows = self._reader().read_scored(pairs)
        list(self._run(rows))
        return [Score.of(row) for row in rows]

    @devices.plain_torch()
    def generate_ids(
        self, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None, **arguments: Any
    ) -> Any:
        """transformers' `generate`: the same arguments, the same result, (n * samples, S + new) token ids.

        `arguments` go before a `generation_config`, that before the model's generation_config.json; `inputs` is another
        name for input_ids. Rows that finish early are filled with the pad token. Processors, criteria and
        prefix_allowed_tokens_fn are called per row, with (1, n) ids; `seed`, or that of the engine, seeds samples.
        Cache arguments and prefill_chunk_size change nothing: OffloadPolicy and EvictionConfig say where keys live and
        how prompts are cut. ValueError for what is unknown, makes no sense, or is not offered (beams, assistants, ...).
        """
        return Generator(self.model, self._reader().read, self._run)(input_ids, attention_mask, arguments)

    def plan(self, workload: Workload) -> Plan:
        """The plan by which this engine would run `workload`, without loading weights. PlanError if there is none.
        Weights that are loaded stay where they are if that is as good."""
        config, spec = self.config, self.model.spec
        tier, baseline = self._compute_tier(), self._baseline + devices.held_bytes(self._loaded)
        dtype, caps = self.model.dtype, self._caps()
        triton = by_triton(self.device, spec.head_dim)
        request = PlanRequest(
            spec,
            workload,
            config.eviction,
            dtype,
            caps,
            tier,
            config.fixed,
            baseline=baseline,
            num_gpus=config.num_gpus,
            triton=triton,
            # Weights that are loaded are no longer a matter of choice.
            choices=self.model.choices if self._loaded is None else {},
            prefixes=0 if self.prefixes is None else self.prefixes.memory,
            recalled=min(1.0, self._recalled["read"] / self._recalled["most"]) if self._recalled["most"] else None,
        )
        planner = self.planner
        if self._loaded is not None and self.last_plan is not None:
            planner = keeping(planner, self.last_plan.policy.weights, self._loaded.seconds)
        return self._retry.within(planner)(request)

    @property
    def timeline(self) -> Timeline:
        """The busy times of all resources, if the engine was made with trace=True."""
        return self._trace.timeline()

    def close(self) -> None:
        """Releases memory, threads and files. A second call does nothing."""
        self._guard.close()
        self._grammars.close()
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.close()
        if self._pins is not None:
            self._pins.close()
        self.model.source.close()

    def _fitting(self, rows: list[Sequence], refused: list[RefusedPrompt]) -> list[Sequence]:
        """The `rows` that can be planned; longer ones are added to `refused`. PlanError if none can be planned."""
        ordered = sorted({row.index: row for row in rows}.values(), key=lambda row: row.prompt_tokens + row.steps)
        fit, none, why = 0, len(ordered) + 1, ""
        while none - fit > 1:
            some = (fit + none) // 2 if why else len(ordered)  # all of them, as a rule
            try:
                self.plan(workload_of(ordered[:some]))
                fit = some
            except PlanError as error:
                if some == 1:
                    raise
                none, why = some, str(error).partition("\n")[0].removesuffix(":")
        refused += [RefusedPrompt(row.index, row.params.num_return_sequences, why) for row in ordered[fit:]]
        kept = {row.index for row in ordered[:fit]}
        return [row for row in rows if row.index in kept]

    def _run(self, rows: list[Sequence], late: LateRows | None = None) -> Iterator[Sequence]:
        """Runs sequences in blocks; yields them as they finish, leaves `last_record`. After memory has run out,
        unfinished ones are planned and run anew, see OomRetry. UsageError while another call runs."""
        with self._guard.taken():
            if not rows:
                return
            self._retry.begin()
            if self.score_log is not None:
                self.score_log.begin()
            meter = RunMetrics(self._trace, self._peak_before)
            sampler = Sampler(self.model.codec.decode if self.model.codec else None)
            waiting, plans = {row.row_id: row for row in rows}, list[Plan]()
            every, newcomers = _work_of(rows), Newcomers(late, waiting)
            del rows  # those that are finished are no longer held
            while waiting:
                group = newcomers.apart() or waiting
                try:
                    plan = self.plan(workload_of(list(group.values())))
                except PlanError as error:
                    if group is waiting:
                        raise
                    newcomers.refuse(group, error)
                    continue
                plans.append(plan)
                if self.on_plan is not None:
                    self.on_plan(plan)
                ran_out = False
                try:
                    for row in self._attempt(plan, group, every, meter, sampler, newcomers):
                        if row.paused:
                            continue
                        del waiting[row.row_id]
                        newcomers.finished(row)
                        meter.finished(row)
                        yield row
                except (MemoryError, RuntimeError, PlanError) as error:
                    self._retry.learn(error, plan, waiting.values())
                    ran_out = True
                again = [row for row in waiting.values() if row.paused]
                for row in again:
                    row.take_turn()
                every += _work_of(again)
                if ran_out:  # not after a turn of the angles: to look through all objects takes as long as many steps
                    forget()
            self.last_work = meter.totals.work
            self.last_record = make_record(self.config, self.model, plans, meter, self._retry.warnings)
            if (recall := self.last_record.recall) is not None:
                self._recalled.update(read=recall["read_bytes"], most=recall["planned"]["most"])

    def _attempt(
        self,
        plan: Plan,
        rows: Mapping[int, Sequence],
        every: Mapping[str, int],
        meter: RunMetrics,
        sampler: Sampler,
        newcomers: Newcomers,
    ) -> Iterator[Sequence]:
        """Runs `rows` by `plan`, block by block, until all are finished or a newcomer needs another plan; every: the
        work of the whole call."""
        before = self._loaded
        with devices.plain_torch():
            loaded = self._load(plan)
        meter.load_seconds += 0.0 if loaded is before else loaded.seconds
        sampler.start()
        runner, left = self._runner(loaded, sampler), _work_of(rows.values())
        runner.on_prompts = self._counting("prefill", every["prompts"] - left["prompts"], every["prompts"])
        runner.on_tokens = self._counting("generating", every["steps"] - left["steps"], every["steps"])
        waiting, size = self._queue(rows.values(), newcomers), plan.policy.gpu_batch_size
        with meter.over(loaded), loaded.keeping_memory():
            while waiting and (first := waiting.take(plan.policy.block_size)):
                block = [first[i : i + size] for i in range(0, len(first), size)]
                with closing(runner.run(plan, block, meter.totals, waiting)) as finished:
                    while True:
                        with devices.plain_torch():  # who takes a row has torch as it was
                            row = next(finished, None)
                        if row is None:
                            break
                        yield row

    def _queue(self, rows: Iterable[Sequence], newcomers: Newcomers) -> WaitingQueue:
        """`rows` in the order in which they are run."""
        ordered = in_order(rows, self._shares)
        if self.prefixes is not None:
            note_returns(ordered)
        return WaitingQueue(ordered, newcomers)

    def _runner(self, loaded: Loaded, sampler: Sampler) -> BlockRunner:
        eviction, finite = make_policy(self.config.eviction), self.config.check_finite
        stages, scores, prefixes = loaded.stages, self.score_log, self.prefixes
        if prefixes is not None:
            prefixes.belongs_to(self._content())
        return BlockRunner(
            self._decoder, stages, eviction, sampler, self._trace, scores, finite, self._shares, prefixes
        )

    def _open_prefixes(self) -> PrefixStore | None:
        """None without one, or if equal tokens of this model may have different keys."""
        config = self.config
        if not config.keeps_prefixes or not self._shares:
            return None
        memory = PREFIX_MEM if config.prefix_mem is None else config.prefix_mem
        disk = PREFIX_DISK if config.prefix_disk is None else config.prefix_disk
        folder = None if config.prefix_dir is None else expanded(config.prefix_dir).absolute()
        return PrefixStore(self._content(), self.model.spec.num_layers, memory, folder, disk, self._needs_sums)

    def _content(self) -> str:
        """Everything that keys and values of a prefix depend on, beside its tokens."""
        config, model = self.config, self.model
        weights = config.seed if model.dummy else None
        bits = [config.weight_bits, config.weight_group, config.weight_importance, config.dequantize]
        packings = sorted((name, repr(packing)) for name, packing in model.spec.packings)
        facts = [model.source.fingerprint, model.dtype, weights, bits, packings, config.eviction.rolling_positions]
        return json.dumps([*facts, self._needs_sums, self.device.type])

    @property
    def _needs_sums(self) -> bool:
        return make_policy(self.config.eviction).column_sums

    @property
    def _shares(self) -> bool:
        return self.config.share_prefixes and self.model.spec.shares_prefixes

    def _load(self, plan: Plan) -> Loaded:
        """The weights as placed by `plan`; loaded anew only if they are elsewhere."""
        self.last_plan = plan
        if self._loaded is not None and self._loaded.serves(plan):
            self._loaded.recap(plan)
            self._trace.watch(self._loaded.ledgers, plan.request.caps.cpu)
            return self._loaded
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None
        if plan.request.spec is not self.model.spec:
            self.model.keep_as(plan.request.spec)
        started = time.perf_counter()
        if must_compile():
            self._progress("compiling kernels", 0, 1)
        library()
        place, trace, note = str(self.offload_folder), self._trace.add, self._progress
        self.model.weigh_inputs(self.offload_folder, self._devices[0], note)
        self._loaded = load(plan, self.model.source, self.config, self._devices, place, trace, note, self._pins)
        self._loaded.seconds = time.perf_counter() - started
        self._trace.watch(self._loaded.ledgers, plan.request.caps.cpu)
        return self._loaded

    def _counting(self, what: str, before: int, total: int) -> Callable[[int], None]:
        """A callback for the tokens done after `before` others, of `total`."""
        return lambda done: self._progress(what, before + done, total)

    def _progress(self, what: str, done: int, total: int) -> None:
        if self.on_progress is not None:
            self.on_progress(what, done, total)

    def _compute_tier(self) -> str:
        return "gpu" if self.device.type == "cuda" or self.config.emulate_gpu is not None else "cpu"

    def _caps(self) -> Caps:
        """The caps as given, else the machine's free memory, of the GPU with least."""
        config, why = self.config, {"cpu": "--cpu-mem", "disk": "--nvme-mem", "gpu": "--gpu-mem"}
        on_gpu, cpu, disk = None, config.cpu_mem, config.disk_mem
        if config.emulate_gpu is not None:
            on_gpu, why["gpu"] = config.emulate_gpu, "--emulate-gpu"
        elif self._pins is not None:
            held = partial(devices.held_bytes, self._loaded)
            limits = (devices.gpu_limit(each, config.gpu_mem, held(each.torch_device)) for each in self._pins.devices)
            on_gpu, why["gpu"] = min(limits)
        if config.num_gpus > 1:
            why["gpu"] += ", of each GPU"
        if cpu is None:
            cpu, why["cpu"] = devices.cpu_limit()
        if disk is None:
            there = bytes_on_disk(self.model.spec, self.model.source, self.model.dtype, self.offload_folder)
            disk, why["disk"] = devices.disk_limit(self.offload_folder, there)
        return Caps(on_gpu, cpu, disk, emulated=config.emulate_gpu is not None, why=why)

    def _reader(self) -> RequestReader:
        model, config = self.model, self.config
        return RequestReader(model.spec, config.eviction, model.codec, config.seed, self._grammars)

    def _output(self, row: Sequence) -> RequestOutput:
        return RequestOutput.of(row, None if self.model.dummy else text_of(self.model.codec, row))
