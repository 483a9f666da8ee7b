"""The training loop: state and data in, steps, validation, checkpoints, artefacts out."""

import dataclasses
import importlib.util
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from forebay.agreement import is_first, together
from forebay.errors import UserError, WrongNumbersError, missing_extra
from forebay.hardware.present import machine_of
from forebay.report.plots import loss_curve
from forebay.report.training import TrainingDisplay
from forebay.train.checkpoint import Checkpoints, truncate_metrics
from forebay.train.data import load_tokenizer, make_train_iterator, make_validation_batches, unigram_entropy
from forebay.train.metrics import MetricsFile, NoMetricsFile, StepMetrics, read_metrics
from forebay.train.planning import run_options
from forebay.train.processes import StopVote, rows_here
from forebay.train.program import Program
from forebay.train.run_config import TrainConfig, to_yaml
from forebay.train.sample import sample
from forebay.train.state import TrainState


class NonFiniteLossError(WrongNumbersError):
    """The loss is not a finite number any more."""


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The end of a run. Losses and entropy in nats per token.

    `time_to_first_step_s` is from the call of `train` to the first step's results: data, weights and compiling.
    `interrupted` is whether it was stopped by a signal before its last step.
    """

    step: int
    loss: float | None
    validation_loss: float | None
    unigram_entropy: float | None
    sample: str | None
    time_to_first_step_s: float | None
    interrupted: bool


def train(config: TrainConfig, program: Program, console: Console) -> TrainResult:
    """Runs `program` on the devices of its mesh. The run directory is made once everything is ready to start.

    Where there are several processes all of them call this, with the same arguments, and a file system that they share;
    the first writes the files, checkpoints are written by all. The result is the same in each.

    Raises:
        UserError: data, weights or checkpoint that do not go with the configuration.
        MissingExtraError: a package that the run will need, now or at its end, is not installed.
        NonFiniteLossError: the loss became infinite or not a number; no checkpoint is written then.
    """
    start = time.perf_counter()
    together(lambda: check_run_dir(config))
    _check_packages(config)
    run_dir = Path(config.run_dir)
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size > program.model.vocab:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and {program.model.name} a vocabulary of "
            f"{program.model.vocab}: set --sizes.vocab to at least {tokenizer.vocab_size}"
        )
    prompt = _prompt(config, tokenizer)
    tokens = program.abstract_batch["inputs"].shape
    index, count = rows_here(program.batch_shardings["inputs"], tokens)
    data = make_train_iterator(
        config.data, batch=config.batch, seq=config.seq, process_index=index, process_count=count
    )
    validation = _validation_batches(config)
    # Orbax takes seconds to import; a run that neither resumes nor saves soon should not wait for it
    checkpoints = _Lazily(lambda: Checkpoints(run_dir / "checkpoints", config.keep_checkpoints))
    if config.resume:
        state, position = checkpoints().restore(program)
        data.set_state(position)
    else:
        state = _first_state(config, program)
    done = int(state.step)
    if done >= config.steps:
        raise UserError(f"the run in {run_dir} has done its {done} steps: raise --steps to go on")

    # the options that `forebay compile` compiles with: what it says is said of this program
    device = program.sharding.mesh.devices.flat[0]
    options, notes = run_options(program, machine_of(device))
    together(lambda: _record_run(config, program, done) if is_first() else None)
    file = MetricsFile(run_dir, config.tensorboard) if is_first() else NoMetricsFile()
    recorder = _Recorder(program, file, validation, start)
    recorder.kept_step = done if config.resume else None
    for note in notes:
        console.print(f"note: {note}", style="yellow", highlight=False)
    step_function = program.jit_step(options)
    vote = StopVote(program.sharding.mesh)
    try:
        with TrainingDisplay(console, config.steps, done) as display, _stop_signals() as stopped:
            recorder.show = display.update
            for step in range(done + 1, config.steps + 1):
                state, results = step_function(state, _place(program, next(data), config.batch))
                recorder.finish_pending()  # of the step before, while this one runs: the device never waits for us
                recorder.pending = (step, results)
                if step == config.steps or _due(config.validate_every, step):
                    recorder.finish_pending(validate_with=state.weights)
                if step < config.steps and _due(config.checkpoint_every, step):
                    recorder.finish_pending()  # a step that went wrong must not be kept
                    checkpoints().save(step, state, data.get_state(), program)
                    recorder.kept_step = step
                    recorder.restart_clock()
                if vote(stopped):
                    break
            recorder.finish_pending()
        finished = int(state.step)
        checkpoints().save(finished, state, data.get_state(), program)
    finally:
        file.close()
        data.close()
        checkpoints.close()
    entropy = unigram_entropy(validation) if validation else None
    if is_first():
        loss_curve(read_metrics(run_dir), entropy, run_dir / "loss.png")
    interrupted = finished < config.steps
    text = None
    if prompt is not None and not interrupted:
        ids = sample(
            program, state.weights, prompt, tokens=config.sample_tokens, temperature=config.sample_temperature,
            seed=config.seed, vocab=tokenizer.vocab_size,
        )  # fmt: skip
        text = config.sample_prompt + tokenizer.decode(ids)
    return TrainResult(
        finished, recorder.loss, recorder.validation_loss, entropy, text, recorder.first_step_s, interrupted
    )


class _Recorder:
    """Reads the results of steps one step late, and writes their records.

    A step's time is from the arrival of the results before it to the arrival of its own, which is the
    device's pace as long as steps follow each other. After anything else ran (compiling, validation, a
    checkpoint) the next step has no time of its own.
    """

    def __init__(self, program: Program, file: MetricsFile | NoMetricsFile, validation: list[Any], start: float):
        self._metrics = StepMetrics(program)
        self._program = program
        self._file = file
        self._validation = validation
        self._evaluate = jax.jit(program.loss)
        self._start = start
        self._clock: float | None = None
        self.pending: tuple[int, dict[str, jax.Array]] | None = None
        self.show: Callable[[dict[str, Any]], None] = lambda record: None
        self.kept_step: int | None = None  # of the newest checkpoint
        self.loss: float | None = None
        self.validation_loss: float | None = None
        self.first_step_s: float | None = None

    def restart_clock(self) -> None:
        self._clock = None

    def finish_pending(self, validate_with: Any = None) -> None:
        """Waits for the pending step and records it; with weights, validates them too.

        Raises:
            NonFiniteLossError: the step's loss, gradient norm or validation loss is infinite or not a number.
            UserError: the model refuses to go on after this step.
        """
        if self.pending is None:
            return
        step, results = self.pending
        self.pending = None
        results = jax.device_get(results)
        now = time.perf_counter()
        if self.first_step_s is None:
            self.first_step_s = now - self._start
        record = self._metrics.record(step, results, None if self._clock is None else now - self._clock)
        self._clock = now
        self.loss = record["loss"]
        finite = math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])
        if finite and validate_with is not None and self._validation:
            losses = [
                self._evaluate(validate_with, _place(self._program, batch, len(batch["inputs"])))
                for batch in self._validation
            ]
            self.validation_loss = record["validation_loss"] = float(np.mean(jax.device_get(losses)))
            self.restart_clock()
            finite = math.isfinite(self.validation_loss)
        self._file.write(record)
        if not finite:
            raise self._not_finite(record)
        if reason := self._program.model.refusal(record):
            raise UserError(f"step {record['step']}: {reason}")
        self.show(record)

    def _not_finite(self, record: dict[str, Any]) -> NonFiniteLossError:
        validated = f", the validation loss {record['validation_loss']}" if "validation_loss" in record else ""
        if self.kept_step is None:
            way_out = "there is no checkpoint: start again with a lower optimizer.learning_rate"
        else:
            way_out = (
                f"the last checkpoint is of step {self.kept_step}: continue from it with --resume and a lower "
                f"optimizer.learning_rate"
            )
        return NonFiniteLossError(
            f"step {record['step']}: the loss is {record['loss']}, the gradient norm {record['grad_norm']}{validated}; "
            f"{way_out}"
        )


class _Lazily:
    """Makes `Checkpoints` when it is first called: importing Orbax takes seconds."""

    def __init__(self, make: Callable[[], Checkpoints]):
        self._make = make
        self._made: Checkpoints | None = None

    def __call__(self) -> Checkpoints:
        if self._made is None:
            self._made = self._make()
        return self._made

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


def check_run_dir(config: TrainConfig) -> None:
    """Whether the run directory is one to start, or to resume, this run in. Changes nothing.

    Raises:
        UserError: it holds something and `resume` is not set; `resume` is set and there is no run.
    """
    run_dir = Path(config.run_dir)
    if config.resume:
        if not (run_dir / "checkpoints").is_dir():
            raise UserError(
                f"there is no run with checkpoints in {str(run_dir)!r} to resume: start it without --resume"
            )
    elif run_dir.is_dir() and any(run_dir.iterdir()):
        again = " or continue it with --resume" if (run_dir / "config.yaml").exists() else ""
        raise UserError(f"the run directory {str(run_dir)!r} is not empty: choose another --run_dir{again}")


def _check_packages(config: TrainConfig) -> None:
    """Raises before the first step what would otherwise come at the end of the run, and cost its result."""
    needed = [
        ("orbax.checkpoint", "orbax-checkpoint", "keeping checkpoints"),
        ("matplotlib", "matplotlib", "plotting the loss"),
    ]
    if config.tensorboard:
        needed.append(("tensorboardX", "tensorboardX", "writing TensorBoard events (tensorboard=true)"))
    for module, package, purpose in needed:
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # the package that would hold it
            found = False
        if not found:
            raise missing_extra(package, "train", purpose)


def _record_run(config: TrainConfig, program: Program, done: int) -> None:
    """Makes the run directory, writes the configuration and the plan, and drops the records of steps that will be done
    again.

    Where a resumed run has others than the steps before it, those are set aside under the number of steps done. What
    already lies there stays: the attempt that it made way for led to no checkpoint.
    """
    run_dir = Path(config.run_dir)
    files = {
        "config.yaml": to_yaml(dataclasses.replace(config, resume=False)),
        "plan.json": json.dumps(program.plan.to_json(), indent=2) + "\n",
    }
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            file = run_dir / name
            aside = file.with_stem(f"{file.stem}.until-step-{done}")
            if file.exists() and file.read_text() != text and not aside.exists():
                file.rename(aside)
            file.write_text(text)
        if config.resume:
            truncate_metrics(run_dir / "metrics.jsonl", done)
    except OSError as error:
        raise UserError(f"cannot write the run directory {str(run_dir)!r}: {error.strerror}") from None


def _first_state(config: TrainConfig, program: Program) -> TrainState:
    if config.weights is None:
        return program.init(jax.random.key(config.seed))
    shardings = program.state_shardings.weights if program.hosted.master is None else program.state_shardings.master
    return program.state_of(program.model.load_hugging_face(config.weights, shardings=shardings))


def _validation_batches(config: TrainConfig) -> list[Any]:
    """Whole batches, in every process: there are few."""
    if config.validation_batches == 0 or (config.data.validation_fraction == 0 and config.data.validation_path is None):
        return []
    micro = config.batch // config.accumulate
    return make_validation_batches(config.data, batch=micro, seq=config.seq, max_batches=config.validation_batches)


def _place(program: Program, batch: Any, rows: int) -> dict[str, jax.Array]:
    """A batch of `rows` over all processes on the devices, from this process's rows of it or from all."""
    return {
        name: jax.make_array_from_process_local_data(sharding, batch[name], (rows, program.config.seq))
        for name, sharding in program.batch_shardings.items()
    }


def _prompt(config: TrainConfig, tokenizer: Any) -> np.ndarray | None:
    """The ids to continue at the end, int32 `[length]`; None where nothing is sampled."""
    if not config.sample_tokens:
        return None
    start = [tokenizer.bos_id] if tokenizer.bos_id is not None else []
    prompt = np.asarray([*start, *tokenizer.encode(config.sample_prompt)], np.int32)
    if not len(prompt):
        raise UserError("sample_prompt is empty: give a text to continue, or set sample_tokens to 0")
    return prompt


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A list that becomes non-empty on SIGINT or SIGTERM; the second SIGINT interrupts at once."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {}
    if threading.current_thread() is threading.main_thread():  # elsewhere signals cannot be handled
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
