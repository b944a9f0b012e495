"""The command line from the outside: one line for a mistake, the right exit code, results in the right folder."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import yaml

import ember.launch.plugins
import ember.launch.start
from ember.config import JobConfig, ModelConfig
from ember.data import store as store_module
from ember.data.folder import CONFIG_HEADER
from ember.data.settings_file import settings_text
from ember.data.store import LocalStore, Write, cant_write
from ember.entrypoints.cli import main as cli
from ember.errors import UserError
from ember.launch.keys import NO_BASE
from ember.launch.outcome import Outcome, worst
from ember.launch.places import MAX_NAME, folder_name, results_folder
from ember.run import main
from ember.sampling_params import SamplingParams

FAST = ["data=prompts.jsonl", "sampling.max_tokens=2", "progress=false"]
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def mistake(job_folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[Sequence[str]], str]:
    """Run words that hold a mistake; returns the text of the one line on stderr."""

    def run(words: Sequence[str]) -> str:
        code = main(words)
        said = capsys.readouterr()
        assert code == 2, said
        assert said.err.startswith("error: ")
        assert said.err.endswith("\n")
        assert said.err.count("\n") == 1
        return said.err.removeprefix("error: ").rstrip("\n")

    return run


def stub_job(monkeypatch: pytest.MonkeyPatch, end: Callable[[JobConfig], float]) -> list[JobConfig]:
    """Replace run_job; `end` raises or returns the exit code. Returns the list of the jobs that ran."""
    import ember.job

    seen: list[JobConfig] = []

    def run_job(config: JobConfig) -> SimpleNamespace:
        seen.append(config)
        return SimpleNamespace(exit_code=end(config), tokens_per_s=12.5)

    monkeypatch.setattr(ember.job, "run_job", run_job)
    return seen


def completions(folder: Path) -> list[str]:
    return pq.read_table(folder / "completions", columns=["prompt"])["prompt"].to_pylist()


LINES = {
    "block_size=16": "data must be given: data=prompts.jsonl (a file, a folder, a glob or a list of them)",
    "block_sise=16": "block_sise=16: no such setting; did you mean block_size?",
    "+block_sise=16": "block_sise=16: no such setting; did you mean block_size?",
    "++block_sise=16": "block_sise=16: no such setting; did you mean block_size?",
    "sampling.top_pp=1": "sampling.top_pp=1: no such setting; did you mean sampling.top_p?",
    "+sampling.top_pp=1": "sampling.top_pp=1: no such setting; did you mean sampling.top_p?",
    "temperature=1": "temperature=1: no such setting; did you mean sampling.temperature?",
    "model.nam=gpt2": "model.nam=gpt2: no such setting; did you mean model.name?",
    "model.zzz=1": "model.zzz=1: no such setting; there are: model.name, model.path",
    "+seed=1": "+seed: the setting exists; write it without the +",
    "block_size.x=3": "block_size.x=3: block_size has no settings below it; it must be a whole number",
    "block_size=abc": "block_size=abc: must be a whole number",
    "block_size=1.5": "block_size=1.5: must be a whole number",
    "block_size=null": "block_size=null: must be a whole number",
    "block_size=0": "block_size=0: must be a whole number >= 1",
    "block_size=1000000000": "block_size=1000000000: too large; the most is 65536",
    f"limit={10**22}": f"limit={10**22}: too large; the most is {2**63 - 1}",
    f"sampling.max_tokens={10**22}": f"sampling.max_tokens={10**22}: too large; the most is {2**63 - 1}",
    "sampling.stop_token_ids=[5,99999]": "sampling.stop_token_ids=[99999]: the model's vocabulary ends at 4095",
    "limit=abc": "limit=abc: must be a whole number, or null",
    "progress=perhaps": "progress=perhaps: must be true, false or json",
    "pool_size=0": "pool_size=0: must be a number of blocks (512), tokens (4096tok), bytes (2GiB, 512MiB) or auto",
    "scheduler=foo": "scheduler=foo: must be one of prefill_first, mixed, static",
    "prefill_share=0": "prefill_share=0.0: must be a share of the token budget: more than 0, at most 1",
    "order=foo": "order=foo: must be one of input, prefix",
    "prefix_cache=maybe": "prefix_cache=maybe: must be true or false",
    "scheduler=[a]": "scheduler=[a]: must be text",
    "speculative=eagle": "speculative=eagle: must be one of off, ngram",
    "sampling.top_p=1.5": "sampling.top_p=1.5: must be in (0, 1]",
    "sampling.top_k=0.01": "sampling.top_k=0.01: must be a whole number",
    "sampling.temperature=nan": "sampling.temperature=nan: must be a number >= 0",
    "sampling.temperature=hot": "sampling.temperature=hot: must be a number",
    "sampling.seed=3": "sampling.seed=3: set the job's `seed` instead (or a seed a row)",
    "sampling=nope": "sampling=nope: no such choice (there are: balanced, creative, greedy, precise)",
    "sampling=[greedy,creative]": "sampling=[greedy,creative]: must be the name of one choice, not a list; "
    "for a sweep, -m sampling=A,B",
    "model=[1]": "model=[1]: must be the name of one choice, not a list; for a sweep, -m model=A,B",
    "sampling=null": "sampling=null: must be the name of a choice, not null",
    "model={path: x}": "model={path: x}: must be the name of a choice; one setting of it is written model.path=x",
    "+sampling=creative": "+sampling: the setting exists; write it without the +",
    "sampling@x=creative": "sampling@x=creative: a setting has no @ in its name; write sampling=VALUE",
    "~block_size": "~block_size: a setting can't be taken away; leave it out for its default, or write "
    "block_size=VALUE",
    "~nope": "~nope: no such setting; `ember --cfg job` shows all",
    "=3": "=3: a setting is written key=value",
    "sampling_columns={max_tokens: null}": "sampling_columns={max_tokens: null}: "
    "sampling_columns.max_tokens must be text",
    "sampling.stop_token_ids=[abc]": "sampling.stop_token_ids=[abc]: must be a list of whole numbers, [1, 2]",
    "sampling.stop={a: b}": "sampling.stop={a: b}: must be text, or a list of texts",
    "force=1": "force=1: must be true or false",
    "block_size=true": "block_size=true: must be a whole number",
    "output=": "output='': must not be empty; leave it out for its default",
    "model.path=./nope": "model.path=./nope: no such folder (a Hub repo id looks like org/name or org/name@revision)",
    "model.path=.": "model.path=.: config.json: no such file; a model folder needs it",
    "sampling=0.5": "sampling=0.5: must be the name of a choice, not a number",
    "model=org/repo": "model=org/repo: no such choice (there are: gpt2, gpt2-large, gpt2-medium, gpt2-xl, "
    "llama-3.2-1b, qwen2.5-0.5b, qwen2.5-1.5b, qwen3-0.6b, qwen3-1.7b, scribe, smollm2, smollm2-1.7b, smollm2-360m, "
    "tiny, tinyllama); a folder or Hub repo is model.path=org/repo",
    "foo": "foo: a setting is written key=value",
    "--foo": "unrecognized arguments: --foo (see --help)",
    "data=a,b.jsonl": "data=a,b.jsonl: a comma makes a sweep, which needs -m; as one text: data='\"a,b.jsonl\"'; "
    "as a list: data=[a,b.jsonl]",
    "data=glob(*)": "data=glob(*): makes a sweep, which needs -m; for a text, as a file pattern: data='\"*.jsonl\"'",
    "output=${nope}": "output: Interpolation key 'nope' not found; "
    "${...} takes another setting's value; as plain text it is written \\${...}",
}


@pytest.mark.parametrize(("word", "line"), LINES.items(), ids=LINES)
def test_a_mistake_is_one_exact_line(word: str, line: str, mistake: Callable[[Sequence[str]], str]) -> None:
    """Hydra prints several lines, advises a + and hides the value; ember names key, value and remedy."""
    words = [word] if word.startswith("data=") or word == "block_size=16" else ["data=prompts.jsonl", word]
    assert mistake(words) == line


@pytest.mark.parametrize("value", ["a=b", "a[1].jsonl", "a(1).jsonl", "a#b.jsonl", "数据.jsonl", "a{b}.jsonl", "~/x"])
def test_a_value_that_hydra_cannot_read_comes_back_quoted(value: str, mistake: Callable[[Sequence[str]], str]) -> None:
    line = mistake([f"data={value}"])
    assert line.startswith(f"data={value}: cannot be read as it stands;")
    assert line.endswith(f": data='\"{value}\"'")


def test_a_mistake_leaves_no_folder(job_folder: Path, mistake: Callable[[Sequence[str]], str]) -> None:
    mistake(["data=prompts.jsonl", "block_size=0"])
    assert not (job_folder / "outputs").exists()


@pytest.mark.parametrize(
    ("words", "code", "left"),
    [
        (["dry_run=true"], 0, []),
        (["-m", "seed=1,2", "dry_run=true"], 0, []),
        (["model.path=./nope"], 2, []),
        (["data=nofile.jsonl"], 2, []),
        (["-m", "data=nofile.jsonl", "shard=range(2)", "num_shards=2"], 2, []),
        (["output=out"], 0, ["out"]),
        (["-m", "seed=1,2", "output=out"], 0, ["out"]),
    ],
)
def test_only_results_stay(words: list[str], code: int, left: list[str], job_folder: Path) -> None:
    """A dry run, a mistake or output=DIR left a second folder under outputs/, with an empty log in it."""
    assert main([*FAST, *words]) == code
    assert sorted(path.name for path in job_folder.iterdir()) == sorted([*left, "prompts.jsonl"])


def test_an_unknown_job_lists_the_shipped_and_own_ones(
    job_folder: Path, mistake: Callable[[Sequence[str]], str]
) -> None:
    own_job("own", "")
    own_job("other", "", job_folder / "elsewhere")
    assert mistake(["-cd", "elsewhere", "-cn", "nope"]) == (
        "no job named nope (there are: cache_sweep, chunked_prefill, continuous_vs_static, dataset, other, own, "
        "paper_waste, pool_size, preemption_cost, prefix_sharing, quickstart; "
        "other folders: -cd FOLDER -cn NAME)"
    )
    assert mistake(["-cd", "nowhere", "-cn", "nope"]) == (
        f"Additional config directory '{job_folder}/nowhere' not found"
    )


def own_job(name: str, text: str, folder: Path = Path("jobs")) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


BASE = "defaults: [config, _self_]\ndata: prompts.jsonl\n"
FILES = {
    f"{BASE}blok_size: 1": "own.yaml: blok_size: no such setting; did you mean block_size?",
    f"{BASE}block_size: abc": "own.yaml: block_size=abc: must be a whole number",
    f"{BASE}sampling: {{seed: 3}}": "sampling.seed=3: set the job's `seed` instead (or a seed a row)",
    "data: prompts.jsonl": NO_BASE,
    "defaults: [confg]": "own.yaml: no config confg to build on",
    "defaults: [config, override sampling: nope]": "sampling=nope: no such choice "
    "(there are: balanced, creative, greedy, precise)",
    f"{BASE}sampling: creative": "own.yaml: sampling=creative: a choice by name goes into the defaults list: "
    "`defaults: [config, override sampling: creative, _self_]`; below `sampling:` stand single settings, {key: value}",
    f"{BASE}model: null": "own.yaml: model=null: a choice by name goes into the defaults list: `defaults: [config, "
    "override model: NAME, _self_]`; below `model:` stand single settings, {key: value}",
    f"{BASE}model.path: x": "own.yaml: model.path: in a file it is written model: {path: VALUE}",
    f"{BASE}schema: [a]": "own.yaml: schema=['a']: must be a mapping, {name: value}",
    f"{BASE}force: 1": "own.yaml: force=1: must be true or false",
    f"{BASE}progress: 2.0": "progress=2.0: must be true, false or json",
    f"{BASE}sampling: {{ignore_eos: 0}}": "own.yaml: sampling.ignore_eos=0: must be true or false",
    f"{BASE}sampling: {{stop_token_ids: [abc]}}": "own.yaml: sampling.stop_token_ids[0]=abc: must be a list of whole "
    "numbers, [1, 2]",
    f"{BASE}sampling: {{temperature: {10**400}}}": "a setting: the number is too large",
    f"{BASE}hydra: {{foo: 1}}": "own.yaml: hydra.foo: Hydra has no such setting",
    "defaults: [config, sampling: creative, _self_]": "sampling is chosen twice; in a job file's defaults list write "
    "`override sampling: creative`",
    "defaults: [config, override sampling: [greedy, creative], _self_]\ndata: x": "sampling: its choice must "
    "be one name; in a job file's defaults `override sampling: NAME`",
    "defaults: config": "own.yaml: defaults must be a list; a job file begins with `defaults: [config, override "
    "sampling: creative, _self_]`",
    "- a": "primary config 'own' must be a DictConfig, got ListConfig",
}


@pytest.mark.parametrize(("text", "line"), FILES.items(), ids=FILES.values())
def test_a_mistake_in_a_job_file_is_one_line(text: str, line: str, mistake: Callable[[Sequence[str]], str]) -> None:
    own_job("own", text)
    assert mistake(["-cn", "own"]) == line


def test_a_mistake_in_a_file_of_a_choice_is_one_line(job_folder: Path, mistake: Callable[[Sequence[str]], str]) -> None:
    """One that lies where no job files do ended in a traceback."""
    own_job("mine", "stop_token_ids: {a: 1}", job_folder / "jobs" / "sampling")
    key = "sampling/mine.yaml: sampling.stop_token_ids={'a': 1}: must be a list of whole numbers, [1, 2]"
    assert mistake(["data=prompts.jsonl", "sampling=mine"]) == key
    (job_folder / "jobs").rename(job_folder / "elsewhere")
    assert mistake(["data=prompts.jsonl", "sampling=mine", f"hydra.searchpath=[file://{job_folder}/elsewhere]"]) == (
        "sampling/mine.yaml: a list stands where a mapping belongs, or a mapping for a list"
    )


def test_a_flag_in_a_file_below_a_job_file_is_true_or_false(
    job_folder: Path, mistake: Callable[[Sequence[str]], str]
) -> None:
    own_job("base", f"{BASE}verify: 1")
    own_job("mine", "ignore_eos: 1", job_folder / "jobs" / "sampling")
    own_job("own", "defaults: [config, base, _self_]")
    own_job("other", "defaults: [config, override sampling: mine, _self_]\ndata: prompts.jsonl")
    assert mistake(["-cn", "own"]) == "base.yaml: verify=1: must be true or false"
    line = "sampling/mine.yaml: sampling.ignore_eos=1: must be true or false"
    assert mistake(["-cn", "other.yaml"]) == line
    assert mistake(["data=prompts.jsonl", "sampling=mine"]) == line


def test_yaml_that_is_none_names_file_and_line(mistake: Callable[[Sequence[str]], str], job_folder: Path) -> None:
    own_job("own", "defaults: [config\nfoo: 1\n")
    assert (
        mistake(["-cn", "own"])
        == f"in \"{job_folder}/jobs/own.yaml\", line 2, column 4: expected ',' or ']', but got ':'"
    )


def test_a_preset_never_loses_unseen_to_a_job_files_path(mistake: Callable[[Sequence[str]], str]) -> None:
    """`model=tiny` on top of a job with a model.path ran the other model."""
    own_job("own", f"{BASE}model: {{path: /some/model}}")
    line = "model=tiny: the job file's model.path=/some/model would win; add model.path=null"
    assert mistake(["-cn", "own", "model=tiny"]) == line


def test_a_sweep_with_no_jobs_is_a_mistake(mistake: Callable[[Sequence[str]], str]) -> None:
    """Hydra launches zero jobs and exits with 0."""
    assert mistake(["-m", "data=glob(*)"]) == (
        "data=glob(*): the sweep has no jobs, no choice of a group matches; for files write data='\"*.jsonl\"'"
    )


def test_a_sweep_over_a_wrong_type_starts_nothing(job_folder: Path, mistake: Callable[[Sequence[str]], str]) -> None:
    assert mistake(["-m", "data=prompts.jsonl", "block_size=8,abc"]) == "block_size=abc: must be a whole number"


def test_a_sweep_over_the_choices_of_a_group_takes_names_only(mistake: Callable[[Sequence[str]], str]) -> None:
    own_job("own", f'{BASE}hydra: {{mode: MULTIRUN, sweeper: {{params: {{sampling: "[1]"}}}}}}')
    assert mistake(["-cn", "own"]).startswith("sampling=[1]: must be the name of one choice, not a list")


def test_a_cluster_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[[Sequence[str]], str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the launcher submitit")
    monkeypatch.setenv("PATH", "/nowhere")
    said = mistake(["-m", "data=prompts.jsonl", "seed=1,2", "hydra/launcher=slurm"])
    assert said.startswith("hydra/launcher=slurm: there is no Slurm here (no sbatch and srun on the PATH)")


def test_a_launcher_for_a_single_job_is_warned_of(
    job_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the launcher submitit")
    seen = stub_job(monkeypatch, lambda config: 0)
    assert main([*FAST, "hydra/launcher=submitit_local"]) == 0
    assert capsys.readouterr().err == (
        "warning: hydra/launcher=submitit_local has no effect without -m: one job runs, here\n"
    )
    assert main(FAST) == 0
    assert capsys.readouterr().err == ""
    assert len(seen) == 2


def test_an_error_of_the_job_itself_is_one_line(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[[Sequence[str]], str]
) -> None:
    def end(config: JobConfig) -> int:
        raise UserError("the pool is too small\nby far")

    stub_job(monkeypatch, end)
    assert mistake(FAST) == "the pool is too small\\nby far"


def test_a_job_that_had_begun_and_cannot_go_on_ends_with_1(
    job_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 would send people, and scripts that mend settings, looking for a mistake that is none: the disk was full."""
    (job_folder / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 4, encoding="utf-8")
    words = [*FAST, "output=out", "commit_every=1", "max_num_seqs=1"]
    assert main([*words, "limit=1"]) == 0
    capsys.readouterr()
    real = LocalStore.put_atomically

    def full(self: LocalStore, name: str, write: Write, **how: bool) -> None:
        if name == "part-00002.parquet":
            raise cant_write(name, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        real(self, name, write, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "put_atomically", full)
        assert main(words) == 1
    assert capsys.readouterr().err == "error: can't write part-00002.parquet: No space left on device\n"
    assert json.loads((job_folder / "out" / "summary.json").read_text())["exit_code"] == 1
    assert main(words) == 0


def fill(patch: pytest.MonkeyPatch, name: str, writes: int) -> None:
    """The disk is full when a file of this name is written for the `writes + 1`th time."""
    real, seen = store_module.write_atomically, []

    def refuse(_file: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(path: Path, fill: Write) -> None:
        hit = name in path.name
        seen.extend([path] * hit)
        real(path, refuse if hit and len(seen) == writes + 1 else fill)

    patch.setattr(store_module, "write_atomically", write)


@pytest.mark.parametrize(
    ("name", "writes"),
    [("manifest.json", 0), (".hashes.json", 0), ("config.yaml", 0), ("summary.json", 0), ("summary.json", 1)],
)
def test_a_disk_that_is_full_at_either_end_of_a_job_ends_it_with_1(
    name: str, writes: int, job_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only between the first row and the last was it no mistake in the settings."""
    words = [*FAST, "output=out"]
    with pytest.MonkeyPatch.context() as patch:
        fill(patch, name, writes)
        assert main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: can't write out/")
    assert said.endswith(f"{name}: No space left on device\n") or name == "manifest.json"
    assert said.count("\n") == 1
    if writes:  # all rows are there, and only the summary is to be mended
        with pytest.MonkeyPatch.context() as patch:
            fill(patch, name, 0)
            assert main(words) == 1
    assert main(words) == 0
    assert json.loads((job_folder / "out" / "summary.json").read_text())["status"] == "finished"


def test_a_disk_too_full_for_hydras_files_ends_with_1(
    job_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Outcome, folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    monkeypatch.setattr(Outcome, "write", full)
    assert main([*FAST, "hydra.run.dir=here"]) == 1
    assert capsys.readouterr().err.endswith(f"\nerror: can't write {job_folder}/here: No space left on device\n")


def test_a_bug_shows_its_traceback(
    job_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub_job(monkeypatch, lambda config: 1 // 0)
    assert main(FAST) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.rstrip().endswith("ZeroDivisionError: integer division or modulo by zero")
    assert "HYDRA_FULL_ERROR" not in said


@pytest.mark.parametrize("package", ["hydra", "omegaconf", "yaml"])
def test_a_bug_below_a_folder_named_as_a_package_is_still_a_bug(
    package: str, job_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a checkout below /data/hydra/ a ValueError of ember's own was one line, as for a mistake."""
    code = compile("def end(config): raise ValueError('mine')", f"/data/{package}/ember/job.py", "exec")
    names: dict[str, Callable[[JobConfig], float]] = {}
    exec(code, names)
    stub_job(monkeypatch, names["end"])
    assert main(FAST) == 1
    assert capsys.readouterr().err.rstrip().endswith("ValueError: mine")


@pytest.mark.parametrize("code", [0, 3, 130, 143])
def test_a_single_run_exits_as_its_job(code: int, job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_job(monkeypatch, lambda config: code)
    assert main(FAST) == code


def refused(*_args: object, **_kwargs: object) -> None:
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), "outputs")


@pytest.mark.parametrize("code", [0, 2, 3, 130, 143])
@pytest.mark.parametrize("words", [[], ["-m", "seed=1"]], ids=["run", "sweep"])
def test_a_folder_that_cannot_be_removed_costs_no_exit_code(
    words: list[str], code: int, job_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra makes a warning of what a callback raises; then the exit code was 0."""
    stub_job(monkeypatch, lambda config: code)
    monkeypatch.setattr(shutil, "rmtree", refused)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main([*FAST, *words]) == code
    assert (job_folder / "outputs").exists()


@pytest.mark.parametrize("broken", ["sweep_outcomes", "forget_outcomes", "worst"])
def test_a_sweep_whose_outcomes_cannot_be_read_does_not_end_with_0(
    broken: str, job_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub_job(monkeypatch, lambda config: 0)
    monkeypatch.setattr(ember.launch.plugins, broken, refused)
    assert main(["-m", *FAST, "seed=1,2"]) == 1
    assert capsys.readouterr().err == "error: [Errno 16] Device or resource busy: 'outputs'\n"


def test_a_job_that_calls_exit_does_not_end_the_sweep(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sys.exit in a job passes through Hydra and would stop every job after it."""

    def end(config: JobConfig) -> int:
        return sys.exit(2) if config.block_size == 8 else 0

    seen = stub_job(monkeypatch, end)
    assert main(["-m", *FAST, "block_size=4,8,16"]) == 2
    assert [config.block_size for config in seen] == [4, 8, 16]


@pytest.mark.parametrize("code", [130, 143])
def test_nothing_starts_after_an_interrupted_job(
    code: int, job_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = stub_job(monkeypatch, lambda config: code if config.block_size == 8 else 3)
    assert main(["-m", *FAST, "block_size=4,8,16"]) == code
    assert [config.block_size for config in seen] == [4, 8]
    assert "not started" in capsys.readouterr().out.splitlines()[-1]


def test_a_keyboard_interrupt_ends_with_130(
    job_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(config: JobConfig) -> int:
        raise KeyboardInterrupt

    stub_job(monkeypatch, end)
    assert main(FAST) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_earlier_sweep_in_the_same_folder_does_not_count(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["-m", *FAST, "hydra.sweep.dir=again"]
    stub_job(monkeypatch, lambda config: 130)
    assert main([*words, "block_size=4,8,16"]) == 130
    stub_job(monkeypatch, lambda config: 0)
    assert main([*words, "block_size=4,8"]) == 0


def test_a_failing_job_leaves_the_rest_of_a_sweep(job_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The middle job's pool can't hold a sequence; the third still runs, and the sweep's code is the worst."""
    assert main(["-m", *FAST, "pool_size=1024tok,16tok,2048tok", "output=sweep"]) == 2
    said = capsys.readouterr()
    assert [line for line in said.out.splitlines() if line.startswith("job ")] == [
        "job 0: pool_size=1024tok",
        "job 1: pool_size=16tok",
        "job 2: pool_size=2048tok",
    ]
    ends = [line.split()[1:3] for line in said.out.splitlines()[-3:]]
    assert ends == [["0", "ok"], ["2", "mistake"], ["0", "ok"]]
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert len(completions(job_folder / "sweep" / "pool_size=2048tok")) == 2


def test_error_rows_end_with_3(job_folder: Path) -> None:
    (job_folder / "prompts.jsonl").write_text('{"prompt": "Call me"}\n{"prompt": 5}\n', encoding="utf-8")
    assert main([*FAST, "output=out"]) == 3
    assert main(["-m", *FAST, "block_size=8,16", "output=sweep"]) == 3


def test_the_worst_exit_code_wins() -> None:
    """An unfinished sweep says so first; then a bug, a mistake, error rows."""
    assert worst([0, 3, 1, 2, 130, 143]) == 143
    assert worst([0, 3, 1, 2, 130]) == 130
    assert worst([0, 3, 1, 2]) == 1
    assert worst([0, 3, 2]) == 2
    assert worst([0, 3]) == 3
    assert worst([0, 0]) == 0
    assert worst([0, 7]) == 1
    assert worst([]) == 0


def test_a_job_that_died_counts_as_failed(tmp_path: Path) -> None:
    assert Outcome.read(tmp_path).exit_code == 1
    (tmp_path / ".ember_exit.json").write_text('{"exit_code": 0', encoding="utf-8")
    assert Outcome.read(tmp_path).exit_code == 1
    Outcome(exit_code=3, overrides=["a=1"]).write(tmp_path)
    assert Outcome.read(tmp_path).exit_code == 3


def test_the_job_gets_plain_settings_and_hydras_folder(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stub_job(monkeypatch, lambda config: (Path(str(config.output)) / "results").write_text(""))
    assert main(["data=[prompts.jsonl,more.jsonl]", "pool_size=512", "sampling.max_tokens=null"]) == 0
    config = seen[0]
    assert type(config) is JobConfig
    assert type(config.data) is list
    assert config.data == ["prompts.jsonl", "more.jsonl"]
    assert config.pool_size == "512"
    assert config.sampling.max_tokens is None
    (folder,) = (job_folder / "outputs" / "config").iterdir()
    assert config.output == str(folder)
    assert (folder / ".hydra" / "config.yaml").exists()
    assert not (folder / "ember.log").exists()  # nothing was logged


def test_free_mappings_are_open(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra closes every mapping: a column for a setting needed a +."""
    seen = stub_job(monkeypatch, lambda config: 0)
    assert main([*FAST, "sampling_columns.top_p=p"]) == 0
    assert main([*FAST, "sampling_columns={top_p: p}"]) == 0
    assert [config.sampling_columns for config in seen] == [{"top_p": "p"}] * 2


@pytest.mark.parametrize("text", ["a\\nb", "\\", "a\n", "${seed}", "\\${seed} {{", "\\\\${{x}}", "é 'q' \"q\""])
def test_a_job_goes_on_with_the_texts_that_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Saved texts that lost a backslash, or took another setting's value, when read again: refused as another job."""
    config = JobConfig(data="x.jsonl", sampling=SamplingParams(json_schema={"enum": [text]}))
    config.template = config.system = text
    config.sampling.stop = config.sampling.bad_words = [text]
    (tmp_path / "config.yaml").write_text(CONFIG_HEADER + settings_text(config), encoding="utf-8")
    seen = stub_job(monkeypatch, lambda config: 0)
    assert main([f"resume={tmp_path}"]) == 0
    assert (seen[0].template, seen[0].system, seen[0].sampling) == (text, text, config.sampling)


def test_a_job_on_a_gguf_file_goes_on_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that was kept relative, as if it were a Hub repo."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.gguf").touch()
    kept = yaml.safe_load(settings_text(JobConfig(data="x.jsonl", model=ModelConfig(path="x.gguf"))))
    assert kept["model"]["path"] == str(tmp_path / "x.gguf")


def test_stop_strings_are_unescaped_once(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stub_job(monkeypatch, lambda config: 0)
    assert main([*FAST, r"sampling.stop='\n'"]) == 0
    assert main([*FAST, r'sampling.stop=["\n\n","a,b"]']) == 0
    assert [config.sampling.stop for config in seen] == [["\n"], ["\n\n", "a,b"]]


def test_home_is_expanded(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell leaves ~ alone inside quotes; a folder named ~ is never meant."""
    monkeypatch.setenv("HOME", "/home/me")
    seen = stub_job(monkeypatch, lambda config: 0)
    assert main(['data="~/a.jsonl"', 'output="~/out"', 'model.path="~/m"']) == 0
    assert (seen[0].data, seen[0].output, seen[0].model.path) == (["/home/me/a.jsonl"], "/home/me/out", "/home/me/m")


@pytest.mark.parametrize("name", ["a b", "a,b", "a=b", "a[1]", "50%", "#1", "数据", "a'b", "(x) {y} ~: z"])
def test_any_file_name_works_in_quotes(name: str, job_folder: Path) -> None:
    """The documented way, data='"..."', which the error line repeats."""
    (job_folder / "prompts.jsonl").rename(f"{name}.jsonl")
    assert main([f'data="{name}.jsonl"', *FAST[1:], f'output="out {name}"']) == 0
    assert completions(job_folder / f"out {name}") == ["Call me", "The sea"]


def test_relative_paths_start_where_the_command_was_typed(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job_folder / "below").mkdir()
    monkeypatch.chdir(job_folder / "below")
    assert main(["data=../prompts.jsonl", *FAST[1:], "output=../out"]) == 0
    assert completions(job_folder / "out") == ["Call me", "The sea"]


def test_a_sweeps_results_are_named_by_what_varies(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stub_job(monkeypatch, lambda config: 0)
    assert main(["-m", *FAST, "output=root", "block_size=8,16", "pool_size=1024tok", "seed=1,2", "model=tiny"]) == 0
    assert [config.output for config in seen] == [f"root/block_size={b},seed={s}" for b in (8, 16) for s in (1, 2)]


def test_parameters_of_a_job_file_vary_unless_overridden(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_job("own", f"{BASE}hydra: {{mode: MULTIRUN, sweeper: {{params: {{block_size: '8,16', seed: '1,2'}}}}}}")
    seen = stub_job(monkeypatch, lambda config: 0)
    assert main(["-cn", "own", "output=root", "seed=5"]) == 0
    assert [config.output for config in seen] == ["root/block_size=8", "root/block_size=16"]
    assert [config.seed for config in seen] == [5, 5]


def test_a_sweep_over_outputs_uses_them_as_they_are(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stub_job(monkeypatch, lambda config: 0)
    assert main(["-m", *FAST, "output=a,b"]) == 0
    assert [config.output for config in seen] == ["a", "b"]


def test_shards_of_a_sweep_share_their_folder(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `output` or without: one data set, in parts of its shards."""
    assert main(["-m", *FAST, "shard=range(2)", "num_shards=2", "output=out"]) == 0
    assert sorted(completions(job_folder / "out")) == ["Call me", "The sea"]
    seen = stub_job(monkeypatch, lambda config: 0)
    assert main(["-m", *FAST, "shard=range(2)", "num_shards=2", "hydra.sweep.dir=sweep"]) == 0
    assert main(["-m", *FAST, "shard=range(2)", "num_shards=2", "seed=1,2", "hydra.sweep.dir=sweep"]) == 0
    root = job_folder / "sweep"
    assert [config.output for config in seen[:2]] == [str(root)] * 2
    assert {config.output for config in seen[2:]} == {f"{root}/seed=1", f"{root}/seed=2"}


def test_folder_names_are_safe_and_differ() -> None:
    assert folder_name(["block_size=16", "pool_size=1024tok"]) == "block_size=16,pool_size=1024tok"
    assert folder_name(["shard=0/4", "output=x"]) == ""
    slashes, underscores = folder_name(["data=a/b"]), folder_name(["data=a_b"])
    assert underscores == "data=a_b"
    assert slashes.startswith("data=a_b-")
    long = {folder_name([f"template={'x' * 300}{i}", "seed=1"]) for i in range(3)}
    assert len(long) == 3
    assert all(len(name.encode()) <= MAX_NAME for name in [*long, folder_name(["template=" + "语" * 200])])


def test_results_folder_joins_urls_as_text() -> None:
    """A Path would make s3:/bucket of it."""
    assert results_folder("s3://bucket/x/", "/h", "seed=1") == "s3://bucket/x/seed=1"
    assert results_folder("out", "/h", "") == "out"
    assert results_folder(None, "/h", "seed=1") == "/h"


def test_own_job_files_go_before_shipped_ones(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed copy of a shipped job, under its name, must be the one that runs."""
    seen = stub_job(monkeypatch, lambda config: 0)
    own_job("quickstart", f"{BASE}seed: 1")
    assert main(["-cn", "quickstart"]) == 0
    own_job("quickstart", f"{BASE}seed: 2", job_folder / "elsewhere")
    assert main(["-cd", "elsewhere", "-cn", "quickstart"]) == 0
    assert [config.seed for config in seen] == [1, 2]


def test_flags_and_overrides_mix(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra's parser rejects overrides after a flag that follows others."""
    seen = stub_job(monkeypatch, lambda config: 0)
    assert main(["data=prompts.jsonl", "-m", "seed=1,2"]) == 0
    assert len(seen) == 2


def test_the_task_returns_tokens_per_second(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweepers that optimise read it; summed up here through the outcome that carries it."""
    stub_job(monkeypatch, lambda config: 0)
    assert main([*FAST, "hydra.run.dir=here"]) == 0
    assert json.loads((job_folder / "here" / ".ember_exit.json").read_text())["tokens_per_s"] == 12.5


def test_the_task_pickles_by_name() -> None:
    """Launchers pickle it; under `python -m` it must not belong to __main__."""
    assert ember.launch.start.task.__module__ == "ember.launch.start"
    assert importlib.util.find_spec("ember.launch.start") is not None


def ember_command(*words: str, folder: Path, code: str = "") -> subprocess.CompletedProcess[str]:
    program = ["-c", code] if code else ["-m", "ember.run"]
    return subprocess.run(
        [sys.executable, *program, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_python_m_runs_a_job(job_folder: Path) -> None:
    done = ember_command(*FAST, "block_size=16", "output=out", folder=job_folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert completions(job_folder / "out") == ["Call me", "The sea"]
    assert yaml.safe_load((job_folder / "out" / "config.yaml").read_text())["block_size"] == 16


def test_python_m_reports_a_mistake(job_folder: Path) -> None:
    done = ember_command("data=a,b.jsonl", folder=job_folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {LINES['data=a,b.jsonl']}\n"


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "RuntimeError('__set_name__') from KeyboardInterrupt()"])
@pytest.mark.parametrize("module", ["ember.run", "ember.entrypoints.cli"])
def test_ctrl_c_while_modules_are_imported_is_one_word(module: str, error: str, job_folder: Path) -> None:
    """Within the first fraction of a second it showed the traceback of an import."""
    code = f"""
import sys
from {module} import main
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "hydra":
            raise {error}
sys.meta_path.insert(0, CtrlC())
sys.exit(main(["data=prompts.jsonl"]))
"""
    done = ember_command(folder=job_folder, code=code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_help_and_mistakes_load_no_torch(job_folder: Path) -> None:
    code = """
import sys
from ember.run import main
assert main(["--help"]) == 0
assert main(["data=x", "block_size=0"]) == 2
assert main(["--cfg", "job"]) == 0
sys.exit("torch" in sys.modules)
"""
    done = ember_command(folder=job_folder, code=code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["run", "--help"]])
def test_help_is_ours_and_short(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(words) == 0
    said = capsys.readouterr().out
    assert "ember -cn quickstart" in said
    assert 10 < said.count("\n") < 45


def test_verbs(job_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = stub_job(monkeypatch, lambda config: 0)
    assert cli(["run", *FAST]) == 0
    assert cli(FAST) == 0
    assert cli(["-m", *FAST, "seed=1,2"]) == 0
    assert len(seen) == 4
    capsys.readouterr()
    assert cli(["version"]) == 0
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ember {ember.__version__}\n" * 2
    assert cli(["prompts.jsonl"]) == 2
    assert capsys.readouterr().err == (
        "error: prompts.jsonl: no such verb (there are: run, plan, serve, export, inspect, report, top, version); "
        "settings are written key=value, as in data=prompts.jsonl\n"
    )
