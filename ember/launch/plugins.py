"""What ember registers with Hydra, in code: the schema, the search path, `${ember_jobs:...}` and the exit codes."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import OverrideParseException
from hydra.experimental.callback import Callback
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ember.config import JobConfig
from ember.data.store import open_store
from ember.data.sweep_note import write_sweep_note
from ember.errors import JobError, UserError
from ember.launch.keys import FREE, is_group, known_keys
from ember.launch.messages import report
from ember.launch.outcome import BUG, CLEAN, ERROR_ROWS, Outcome, drop_bare, forget_outcomes, sweep_outcomes, worst
from ember.launch.overrides import check_overrides
from ember.launch.places import folder_name, job_folders, shipped
from ember.launch.settings import as_typed, job_config


class JobFolders(SearchPathPlugin):
    """Job files are looked for in `-cd DIR`, then ./jobs, then the shipped jobs: the user's own go first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra once a start, after it has added conf/."""
        for folder in job_folders():
            search_path.append("ember", f"file://{folder}")


class ExitCode(Callback):
    """Ends the process with the exit code of its job, or of the worst job of its sweep."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Find mistakes before Hydra makes a folder."""
        try:
            job_config(_without_hydra(config), as_typed(config.hydra.overrides.task))
            _check_choices(config)
        except UserError as error:
            raise SystemExit(report(error)) from None
        except OmegaConfBaseException:
            return  # an interpolation that only the running job can resolve; it checks again
        _warn_of_an_idle_launcher(config)

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """A single job has ended."""
        ended: JobReturn = kwargs["job_return"]
        if ended.status == JobStatus.COMPLETED and ended.hydra_cfg is not None:
            with _heard():
                folder = Path(ended.hydra_cfg.hydra.runtime.output_dir)
                raise SystemExit(_ended(folder, Outcome.read(folder).exit_code))

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Find mistakes, forget an earlier sweep in this folder, and tell every job which overrides don't vary."""
        with _heard():
            _check_choices(config)
            check_overrides(_sweep_lines(config))
            _check_launcher(config)
            forget_outcomes(Path(config.hydra.sweep.dir))
        naming = config.hydra.job.config.override_dirname
        keys = sorted({*naming.exclude_keys, *_fixed_keys(config)})
        with open_dict(config):
            naming.exclude_keys = keys
            config.hydra.overrides.hydra.append(f"hydra.job.config.override_dirname.exclude_keys=[{','.join(keys)}]")

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Say what each job did."""
        with _heard():
            outcomes = sweep_outcomes(Path(config.hydra.sweep.dir))
            if not outcomes:
                raise UserError(_no_jobs(config))
            with contextlib.suppress(BrokenPipeError):  # `ember -m ... | head`
                _show(outcomes)
            _close(outcomes, report=bool(config.get("report")))
            raise SystemExit(_ended(Path(config.hydra.sweep.dir).absolute(), worst(o.exit_code for o in outcomes)))


@contextlib.contextmanager
def _heard() -> Iterator[None]:
    """Hydra makes a warning of what a callback raises, and goes on to exit code 0: only SystemExit gets past it."""
    try:
        yield
    except OSError as error:
        raise SystemExit(report(JobError(str(error)))) from None
    except Exception as error:
        raise SystemExit(report(error)) from None


def _show(outcomes: list[Outcome]) -> None:
    print(f"\n{' job':>4}  exit  {'end':<11}  {'speed':>14}  settings", *(o.line() for o in outcomes), sep="\n")
    sys.stdout.flush()


def _close(outcomes: list[Outcome], *, report: bool) -> None:
    """Where the jobs' results lie together: note which have none, and write a report of the whole sweep."""
    done = [outcome for outcome in outcomes if outcome.output and "://" not in outcome.output]
    folders = {Path(outcome.output).parent for outcome in done}
    if len(folders) != 1 or len({folder_name(outcome.overrides) for outcome in outcomes}) < 2:
        return  # nothing together, or shards of one job
    (folder,) = map(str, folders)
    by_name = any(Path(outcome.output).name == folder_name(outcome.overrides) for outcome in done)
    failed = [outcome for outcome in outcomes if outcome.exit_code not in (CLEAN, ERROR_ROWS)]
    names = {folder_name(o.overrides) if by_name else str(o.number): o.word for o in failed}
    write_sweep_note(open_store(folder), names)
    if report:
        from ember.report.report import report_at_the_end  # pyarrow is slow to import

        report_at_the_end(folder)


def _ended(folder: Path, exit_code: int) -> int:
    """The exit code; Hydra's notes stay only beside results, after a bug, and in a folder that the user named."""
    if exit_code != BUG:
        drop_bare(folder, Path("outputs").absolute())
    return exit_code


def register() -> None:
    """Add all this to Hydra; again does no harm."""
    store = ConfigStore.instance()
    store.store(name="job_schema", node=_schema(), provider="ember")
    exit_code = {"ember": {"_target_": f"{ExitCode.__module__}.{ExitCode.__qualname__}"}}
    store.store(group="hydra", name="config", node=HydraConf(callbacks=exit_code), provider="ember")
    Plugins.instance().register(JobFolders)
    OmegaConf.register_new_resolver("ember_jobs", lambda path: str(shipped("jobs") / path), replace=True)


def _schema() -> DictConfig:
    """JobConfig, with its free mappings open: Hydra closes every mapping to keys that it does not know."""
    schema: DictConfig = OmegaConf.structured(JobConfig)
    for key in FREE:
        OmegaConf.set_struct(OmegaConf.select(schema, key), False)
    return schema


def _check_choices(config: DictConfig) -> None:
    """Every group has one choice: Hydra also takes none, or a list of which the last wins."""
    if OmegaConf.get_type(config) is not JobConfig:
        return  # each job says so
    for group in filter(is_group, known_keys()):
        choice = OmegaConf.to_container(config.hydra.runtime.choices).get(group)  # type: ignore[union-attr]
        if not isinstance(choice, str):
            raise UserError(f"{group}: its choice must be one name; in a job file's defaults `override {group}: NAME`")


def _check_launcher(config: DictConfig) -> None:
    if "SlurmLauncher" in config.hydra.launcher._target_ and not all(map(shutil.which, ("sbatch", "srun"))):
        raise UserError(
            "hydra/launcher=slurm: there is no Slurm here (no sbatch and srun on the PATH); start it on a machine of "
            "the cluster, or run on this one: hydra/launcher=joblib"
        )


def _warn_of_an_idle_launcher(config: DictConfig) -> None:
    launcher = OmegaConf.to_container(config.hydra.runtime.choices).get("hydra/launcher")  # type: ignore[union-attr]
    if launcher != "basic":
        print(f"warning: hydra/launcher={launcher} has no effect without -m: one job runs, here", file=sys.stderr)


def _without_hydra(config: DictConfig) -> DictConfig:
    job = config.copy()
    with open_dict(job):
        del job["hydra"]
    return job


def _sweep_lines(config: DictConfig) -> list[str]:
    params: DictConfig = OmegaConf.select(config, "hydra.sweeper.params") or OmegaConf.create()
    own = [f"{key!s}={value}" for key, value in params.items_ex(resolve=False)]
    return [*own, *as_typed(config.hydra.overrides.task)]


def _fixed_keys(config: DictConfig) -> list[str]:
    """The keys set to one value for the whole sweep; a later line for the same key wins."""
    try:
        overrides = OverridesParser.create().parse_overrides(_sweep_lines(config))
    except OverrideParseException:
        return []  # the sweeper says so itself
    sweeping = {o.key_or_group: o.is_sweep_override() for o in overrides}
    return [key for key, sweeps in sweeping.items() if not sweeps]


def _no_jobs(config: DictConfig) -> str:
    globs = [line for line in _sweep_lines(config) if "=glob(" in line]
    if not globs:
        return "the sweep has no jobs: an override with an empty list of values"
    key = globs[0].partition("=")[0]
    return f"{globs[0]}: the sweep has no jobs, no choice of a group matches; for files write {key}='\"*.jsonl\"'"
