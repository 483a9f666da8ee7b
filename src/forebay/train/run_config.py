"""The arguments of a training run: the program, the data and what is kept."""

import dataclasses
import math

import yaml

from forebay.errors import UserError
from forebay.train.config import ProgramConfig
from forebay.train.data import DataConfig

_LEAST = {
    "seed": 0,
    "checkpoint_every": 0,
    "keep_checkpoints": 1,
    "validate_every": 0,
    "validation_batches": 0,
    "sample_tokens": 0,
    "sample_temperature": 0,
}


@dataclasses.dataclass(frozen=True)
class TrainConfig(ProgramConfig):
    """A training run.

    Attributes:
        run_dir: where configuration, plan, metrics, checkpoints and plots go; it must not exist yet, or be empty.
        resume: continue the run in run_dir from its newest checkpoint.
        seed: seed of the initial weights and of the sampled text.
        data: the text to train on.
        weights: a Hugging Face directory (config.json and safetensors) to start from instead of random weights.
        checkpoint_every: steps between checkpoints; 0 is only at the end.
        keep_checkpoints: how many of the newest checkpoints are kept.
        validate_every: steps between validations; 0 is only at the end.
        validation_batches: batches of one validation; 0 does not validate.
        sample_prompt: text that is continued at the end.
        sample_tokens: tokens of the continuation; 0 does not sample.
        sample_temperature: temperature of the sampling; 0 takes the likeliest token.
        tensorboard: also write TensorBoard events.

    Raises:
        UserError: a number outside of its range.
    """

    run_dir: str = "runs/default"
    resume: bool = False
    seed: int = 0
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    weights: str | None = None
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    validate_every: int = 100
    validation_batches: int = 16
    sample_prompt: str = "def "
    sample_tokens: int = 200
    sample_temperature: float = 0.8
    tensorboard: bool = True

    def __post_init__(self):
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise UserError(f"{name}={value} must be at least {least}")
        if self.seed >= 2**31:
            raise UserError(f"seed={self.seed} must be less than {2**31}")


@dataclasses.dataclass(frozen=True)
class LaunchConfig(TrainConfig):
    """A training run and the processes that it is started in, which are no part of it: what a run directory holds does
    not depend on them.

    Attributes:
        processes: how many processes the run has. With more than 1 and no coordinator all are started here, on this
            machine's CPU.
        devices: CPU devices of all processes together; by default those of the mesh, else one for each process.
        coordinator: host:port of the first process, where a launcher starts them; auto leaves that, their number and
            process_id to jax, which knows SLURM, Open MPI, Kubernetes and Cloud TPU.
        process_id: which of the processes this is, from 0, where a launcher starts them.
    """

    processes: int = 1
    devices: int | None = None
    coordinator: str = ""
    process_id: int | None = None

    @property
    def run(self) -> TrainConfig:
        """The run alone."""
        return TrainConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(TrainConfig)})


def to_yaml(config: TrainConfig) -> str:
    """The configuration with every field, as a file that `--config` reads back."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
