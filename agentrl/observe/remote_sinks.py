"""Loggers that are packages of their own: mlflow, swanlab, trackio, wandb."""

from __future__ import annotations

import re
import time
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel

from agentrl.config.keys import flatten
from agentrl.errors import ConfigError
from agentrl.observe.generations import Generation
from agentrl.observe.tracking import RunInfo, Sink, need_package, one_line
from agentrl.system.publish import published

if TYPE_CHECKING:
    import swanlab
    import trackio
    import wandb
    from mlflow import MlflowClient


def kept_id(file: Path, new: str) -> str:
    """Return the id that `file` holds, or write `new` into it."""
    if not file.exists():
        with published(file) as partial:
            partial.write_text(new)
    return file.read_text().strip()


def table_of(generations: Sequence[Generation]) -> tuple[list[str], list[list[object]]]:
    """Return (names of columns, rows) of some generations, one at least."""
    rows = list(map(asdict, generations))
    return list(rows[0]), [list(row.values()) for row in rows]


def finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Leave out values that are not finite."""
    return {name: value for name, value in metrics.items() if value is not None}


class LoggedRun(Protocol):
    """A run as swanlab, trackio and wandb have it."""

    def log(self, data: dict[str, float], /, *, step: int) -> object: ...

    def finish(self) -> object: ...


RunT = TypeVar("RunT")
LoggedRunT = TypeVar("LoggedRunT", bound=LoggedRun)


class PackageSink(Sink, Generic[RunT]):
    """A logger of a package. Its run begins at the first write, and a resumed run continues in the same one."""

    is_remote = True
    package: ClassVar[str]
    """Name of the package, and of the extra of ours that installs it."""

    def __init__(self, run: RunInfo) -> None:
        need_package(self.package, self.package)
        super().__init__(run)
        self._begun: RunT | None = None

    @abstractmethod
    def begin(self) -> RunT:
        """Begin the package's run, or continue it."""

    @abstractmethod
    def end(self, begun: RunT) -> None:
        """End the package's run."""

    def ensure_begun(self) -> RunT:
        """Return the package's run, which the first call begins. Raises ConfigError where the package refuses."""
        if self._begun is None:
            try:
                self._begun = self.begin()
            except Exception as error:  # no account, no server, a backend that is not installed
                raise ConfigError(
                    f"trainer.logger: {self.package} begins no run: {one_line(error)}. Its settings are the package's "
                    f"own (environment, files of login) and trainer.logger_options.{self.package}; to go without it, "
                    "leave it out of trainer.logger"
                ) from error
        return self._begun

    def truncate_after(self, step: int) -> None:
        """Begin the run. No package can delete logged values."""
        self.ensure_begun()

    def close(self) -> None:
        if self._begun is not None:
            self.end(self._begun)


class RunSink(PackageSink[LoggedRunT]):
    """A logger whose package has runs that are logged to and finished."""

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self.ensure_begun().log(finite(metrics), step=step)

    def end(self, begun: LoggedRunT) -> None:
        begun.finish()


def mlflow_name(name: str) -> str:
    """Write a metric's name in the characters that MLflow allows; data sources of rows are in some."""
    allowed = re.sub(r"[^\w/. :-]", "_", name.replace("@", "_at_"))[:MLFLOW_LENGTH]
    return "/".join(part for part in allowed.split("/") if part not in ("", ".", ".."))


MLFLOW_LENGTH = 250
"""Characters of a name that MLflow takes."""


class MLflowOptions(BaseModel):
    """Keys of `trainer.logger_options.mlflow`."""

    tracking_uri: str | None = None
    """Server or folder; null: as MLFLOW_TRACKING_URI says."""


class MLflow(PackageSink["MlflowClient"]):
    """A run of the mlflow experiment that trainer.project_name names.

    MLflow allows few characters in names, and of one wrong name refuses the whole step: @ becomes _at_, others _.

    Steps that a resumed run does again are there twice.
    """

    package = "mlflow"

    def __init__(self, run: RunInfo, options: MLflowOptions) -> None:
        super().__init__(run)
        self._options = options
        self._id = ""

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        found = [Metric(mlflow_name(name), value, now, step) for name, value in finite(metrics).items()]
        self.ensure_begun().log_batch(self._id, metrics=found)

    def write_generations(self, step: int, generations: Sequence[Generation]) -> None:
        names, rows = table_of(generations)
        columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
        self.ensure_begun().log_table(self._id, columns, f"val_generations/{step:06d}.json")

    def begin(self) -> MlflowClient:
        from mlflow import MlflowClient

        client, info = MlflowClient(self._options.tracking_uri), self.run
        found = client.get_experiment_by_name(info.project)
        experiment = client.create_experiment(info.project) if found is None else found.experiment_id
        file = info.dir / "mlflow_id"
        if file.exists():
            self._id = file.read_text().strip()
            client.update_run(self._id, status="RUNNING")
        else:
            self._id = kept_id(file, client.create_run(experiment, run_name=info.experiment).info.run_id)
        client.log_dict(self._id, dict(info.config), "config.yaml")
        return client

    def end(self, begun: MlflowClient) -> None:
        begun.set_terminated(self._id)


class SwanLabOptions(BaseModel):
    """Keys of `trainer.logger_options.swanlab`; see `swanlab.init` for their meaning."""

    workspace: str | None = None
    group: str | None = None
    mode: str | None = None
    tags: list[str] = []


class SwanLab(RunSink["swanlab.Run"]):
    """A swanlab run. It ignores steps that a resumed run does again."""

    package = "swanlab"

    def __init__(self, run: RunInfo, options: SwanLabOptions) -> None:
        super().__init__(run)
        self._options = options

    def write_generations(self, step: int, generations: Sequence[Generation]) -> None:
        import swanlab

        texts = [swanlab.Text(one.as_text(), caption=f"{one.data_source} {one.score}") for one in generations]
        self.ensure_begun().log({"val/generations": texts}, step=step)

    def begin(self) -> swanlab.Run:
        import swanlab

        info, options = self.run, self._options
        return swanlab.init(
            project=info.project,
            name=info.experiment,
            config=dict(info.config),
            log_dir=str(info.dir / "swanlab"),
            id=kept_id(info.dir / "swanlab_id", uuid.uuid4().hex[:21]),
            resume="allow",
            workspace=options.workspace,
            group=options.group,
            mode=options.mode,
            tags=options.tags or None,
        )


class TrackioOptions(BaseModel):
    """Keys of `trainer.logger_options.trackio`; see `trackio.init` for their meaning."""

    space_id: str | None = None
    group: str | None = None


class Trackio(RunSink["trackio.Run"]):
    """A trackio run, on this machine or in a Hugging Face space.

    Steps that a resumed run does again are there twice.
    """

    package = "trackio"

    def __init__(self, run: RunInfo, options: TrackioOptions) -> None:
        super().__init__(run)
        self._options = options

    def write_generations(self, step: int, generations: Sequence[Generation]) -> None:
        import trackio

        columns, rows = table_of(generations)
        self.ensure_begun().log({"val/generations": trackio.Table(columns=columns, data=rows)}, step=step)

    def begin(self) -> trackio.Run:
        import trackio

        info, options, file = self.run, self._options, self.run.dir / "trackio_name"
        plain = {name: value for name, value in flatten(info.config, {}).items() if not isinstance(value, dict)}
        begun = trackio.init(
            project=info.project,
            name=file.read_text() if file.exists() else info.experiment,
            config=plain,
            resume="must" if file.exists() else "never",
            space_id=options.space_id,
            group=options.group,
            embed=False,
        )
        kept_id(file, begun.name)  # another one than was asked for, where that is taken
        return begun


class WandbOptions(BaseModel):
    """Keys of `trainer.logger_options.wandb`; see `wandb.init` for their meaning."""

    entity: str | None = None
    group: str | None = None
    tags: list[str] = []


class Wandb(RunSink["wandb.Run"]):
    """A wandb run. It ignores steps that a resumed run does again."""

    package = "wandb"

    def __init__(self, run: RunInfo, options: WandbOptions) -> None:
        super().__init__(run)
        self._options = options

    def write_generations(self, step: int, generations: Sequence[Generation]) -> None:
        import wandb

        columns, rows = table_of(generations)
        self.ensure_begun().log({"val/generations": wandb.Table(columns=[*columns], data=rows)}, step=step)

    def begin(self) -> wandb.Run:
        import wandb

        info, options = self.run, self._options
        return wandb.init(
            project=info.project,
            name=info.experiment,
            dir=str(info.dir),
            id=kept_id(info.dir / "wandb_id", uuid.uuid4().hex[:8]),
            resume="allow",
            config=dict(info.config),
            entity=options.entity,
            group=options.group,
            tags=options.tags or None,
        )
