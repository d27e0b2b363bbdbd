"""Configuration: inheritance, overrides, YAML's traps, and errors that name the key and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config import load_job, load_mapping, resolve_path
from capt.pretrain.config.base import Section
from capt.pretrain.config.load import job_from_mapping, shipped_jobs
from capt.pretrain.contrastive.task import noise_digest
from capt.pretrain.language.config import LanguageJob


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_later_wins_defaults_base_file_command_line(tmp_path: Path) -> None:
    _write(
        tmp_path, "grand.yaml", "task: {type: capt_language}\noptimizer: {lr: 1.0e-3, eps: 1.0e-8}\nrun: {seed: 5}\n"
    )
    _write(tmp_path, "parent.yaml", "base: grand.yaml\noptimizer: {lr: 2.0e-3, betas: [0.8, 0.9]}\n")
    path = _write(tmp_path, "job.yaml", "base: [parent.yaml]\noptimizer: {betas: [0.7, 0.9]}\nrun: {seed: 6}\n")
    job = load_job(path, ["run.seed=7", "data.files=[a.txt, b.txt]", "model.size=tiny"])
    assert isinstance(job, LanguageJob)
    assert (job.optimizer.lr, job.optimizer.eps, job.optimizer.betas) == (2e-3, 1e-8, (0.7, 0.9))
    assert (job.run.seed, job.data.files, job.model.hidden) == (7, ["a.txt", "b.txt"], 128)
    assert job.optimizer.weight_decay == 0.01


def test_shipped_jobs_are_found_by_bare_name() -> None:
    assert resolve_path("capt_tiny").name == "capt_tiny.yaml"
    with pytest.raises(ConfigError, match="did you mean the shipped job 'capt_tiny'"):
        resolve_path("capt_tinny")


def test_a_shipped_file_is_named_from_any_folder_on_while_that_is_clear() -> None:
    assert resolve_path("rte") == resolve_path("glue/rte") == resolve_path("finetune/glue/rte")
    assert resolve_path("ptb/vae").parent.name == "ptb"
    with pytest.raises(ConfigError, match=r"'vae' is the name of several shipped files: ptb/vae, yahoo/vae, yelp/vae"):
        resolve_path("vae")


def test_the_list_of_shipped_jobs_names_families_as_the_documentation_does() -> None:
    with pytest.raises(ConfigError, match=r"shipped: ace/\.\.\., capt_adapt, .*, ptb/\.\.\., qnli, ") as error:
        resolve_path("nothing_like_it_42")
    assert "skipgram" not in str(error.value)
    assert resolve_path("ace/finetune") == resolve_path("pretrain/ace/finetune")


def test_every_shipped_job_is_listed_with_a_line_of_its_own() -> None:
    jobs = shipped_jobs()
    assert {"capt_tiny", "rte", "ptb/vae", "vqa", "sweep/vqa"} <= jobs.keys()
    assert not any(name.startswith(("_", "cluster/")) or "/_" in name for name in jobs)
    for name, line in jobs.items():
        assert resolve_path(name, sweep=name.startswith("sweep/")).is_file()
        assert len(line) > 5, name
        assert "\n" not in line


def test_a_preset_of_word_embeddings_says_which_text_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"ace/ace: data\.files: required key is missing: paths or globs"):
        load_job("ace/ace")


def test_of_a_missing_section_the_key_is_named_that_it_must_have() -> None:
    with pytest.raises(ConfigError, match=r"^mine: data\.train: required key is missing: a \.csv, \.tsv"):
        load_job("mine", ["model.init=x"])


def test_resolved_configuration_reads_back_the_same(tmp_path: Path) -> None:
    job = load_job("capt_small", ["data.files=x.txt", "batch.global=64"])
    text = yaml.safe_dump(job.model_dump(mode="json", by_alias=True), sort_keys=False)
    assert load_job(_write(tmp_path, "config.yaml", text)) == job


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.5E3", 1500.0),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("12", 12),
        ("010", 10),
        ("24:00:00", "24:00:00"),
        ("2026-11-20", "2026-11-20"),
        (".5", 0.5),
        ("-2.", -2.0),
    ],
)
def test_yaml_reads_what_people_mean(tmp_path: Path, text: str, value: object) -> None:
    mapping = load_mapping(_write(tmp_path, "a.yaml", f"key: {text}\n"))
    assert mapping["key"] == value
    assert type(mapping["key"]) is type(value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["contrast.queu=3"], "contrast.queu: unknown key; did you mean 'queue'?"),
        (["contrast.temperature.typ=constant"], "contrast.temperature.typ: unknown key; did you mean 'type'?"),
        (["batch.globl=3"], "did you mean 'global'?"),
        (["optimiser.lr=1"], "optimiser: unknown key; did you mean 'optimizer'?"),
        (["contrast.queue=-1"], "contrast.queue: -1"),
        (["contrast.temperature.value=0"], "contrast.temperature.value: 0"),
        (["contrast.temperature.type=cosine"], "inverted_triangle"),
        (["corruption.type=mask_tokns"], "did you mean 'mask_tokens'?"),
        (["optimizer.lr=nan"], "optimizer.lr"),
        (["optimizer.lr=0"], "optimizer.lr: 0"),
        (["corruption.rate=1.5"], "corruption.rate: 1.5"),
        (["data.sequence_length=600"], "data.sequence_length 600 is longer than the position table"),
        (["contrast.queue=0", "contrast.in_batch=none"], "leaves no negatives"),
        (["contrast.in_batch=none", "contrast.queue_start=5"], "no negatives before queue_start; set queue_start=0"),
        (["optimizer.type=lamb"], "lamb needs engine.zero_stage 0"),
        (["engine.offload_param=true"], "offload_param needs zero_stage 3"),
        (["model.heads=7"], "heads 7 does not divide hidden"),
        (["run.seed"], "not of the form a.b=value"),
        (["data.files=[s3://bucket/a?.txt]"], "this list or mapping is not YAML; quote the texts in it"),
        (["run.dir=${nothing}"], "nothing"),
    ],
)
def test_mistakes_are_one_line_with_the_key_and_a_remedy(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_job("capt_small", overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_pairs_have_no_loss_of_the_queue_alone() -> None:
    settings = ["data.files=pairs.jsonl", "model.init=encoder", "contrast.queue=64", "contrast.queue_share=null"]
    with pytest.raises(ConfigError, match=r"contrast\.queue_weight: in capt_pairs the queue is part of the contrast"):
        load_job("capt_pairs", [*settings, "contrast.queue_weight=0.1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "key 'a' is on line 1 and again on line 3"),
        ("a: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
        ("- 1\n- 2\n", "must hold a mapping"),
        ("a: [1\n", "not valid YAML"),
        ("base: self.yaml\n", "goes round in a circle"),
        ("base: nowhere.yaml\n", "no configuration file 'nowhere.yaml'"),
    ],
)
def test_malformed_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        load_mapping(_write(tmp_path, "self.yaml", text))


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 3\)"):
        load_mapping(tmp_path / "a.yaml")


def test_batch_identity_names_what_would_fit() -> None:
    job = load_job("rte", ["data.path=unread", "model.init=unread", "batch.global=96", "batch.micro=32"])
    assert job.accumulation(3) == 1
    with pytest.raises(
        ValueError, match=r"batch.global 96 is not batch.micro 32 x accumulation x 2 ranks; .*\[.*16, 24, 48\]"
    ):
        job.accumulation(2)


@pytest.mark.parametrize("micro", [1, 2, 3, 16, None])
def test_any_number_of_ranks_shares_a_pretraining_batch(micro: int | None) -> None:
    job = load_job("capt_small", ["batch.global=96", f"batch.micro={'null' if micro is None else micro}"])
    for world in range(1, 110):
        shares = {96 // world, -(-96 // world)}
        if world > 96 or (micro == 1 and len(shares) > 1):
            fits = "batch.global=" if world > 96 else "batch.micro=2"
            with pytest.raises(ValueError, match=rf"batch.global 96 leaves one of {world} ranks without .* set {fits}"):
                job.accumulation(world)
            continue
        parts = job.accumulation(world)
        assert -(-max(shares) // parts) <= job.micro_batch(world)  # the largest micro-batch fits
        assert parts == 1 or -(-max(shares) // (parts - 1)) > job.micro_batch(world)  # and fewer would not


def test_a_lost_host_costs_its_part_and_no_more() -> None:
    """127 of 128 hosts of 8 ranks take the batch of capt_large, of which no rank has more than one sequence more."""
    job = load_job("capt_large", ["batch.micro=8"])
    assert [job.accumulation(world) for world in (1024, 1016, 512)] == [1, 2, 2]
    assert load_job("capt_large", ["batch.micro=16"]).accumulation(1016) == 1


def test_what_a_run_wrote_is_read_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of somebody else must not read this host's environment, nor its files, into runs and model cards."""
    monkeypatch.setenv("HF_TOKEN", "canary")
    _write(tmp_path, "grand.yaml", "data: {files: [secret.txt]}\n")
    path = _write(tmp_path, "config.yaml", "task: {type: capt_language}\ndata: {files: ['${oc.env:HF_TOKEN}']}\n")
    job = load_job(path, ["run.dir=${oc.env:HF_TOKEN}"], resolved=True)
    assert isinstance(job, LanguageJob)
    assert (job.data.files, str(job.run.dir)) == (["${oc.env:HF_TOKEN}"], "${oc.env:HF_TOKEN}")
    path = _write(tmp_path, "config.yaml", "base: grand.yaml\ntask: {type: capt_language}\ndata: {}\n")
    with pytest.raises(ConfigError, match="base: unknown key"):
        load_job(path, resolved=True)


def test_overrides_of_what_a_run_wrote_are_merged_as_ever(tmp_path: Path) -> None:
    text = (
        "task: {type: capt_language}\ndata: {source: docstrings, sequence_length: 64}\noptimizer: {betas: [0.1, 0.2]}\n"
    )
    path = _write(tmp_path, "config.yaml", text)
    job = load_job(path, ["data.files=[a.txt]", "optimizer.betas=[0.3, 0.4]"], resolved=True)
    assert isinstance(job, LanguageJob)
    assert (job.data.source, job.data.files, job.data.sequence_length) == ("files", ["a.txt"], 64)
    assert job.optimizer.betas == (0.3, 0.4)


@pytest.mark.parametrize(
    ("stored", "override", "source"),
    [
        ("source: docstrings", "data.files=[b.txt]", "files"),
        ("{source: hub, name: x/y, subset: s, split: test, validation_split: v}", "data.files=[b.txt]", "files"),
        ("{source: files, files: [a.txt], validation_files: [v.txt]}", "data.name=x/y", "hub"),
        ("{source: files, shards: old}", "data.files=[b.txt]", "files"),
        ("{source: null}", "data.shards=new", "files"),
    ],
)
def test_text_that_is_named_later_takes_the_place_of_the_other(
    tmp_path: Path, stored: str, override: str, source: str
) -> None:
    stored = stored if stored.startswith("{") else f"{{{stored}}}"
    path = _write(tmp_path, "config.yaml", f"task: {{type: capt_language}}\ndata: {stored}\n")
    for resolved in (True, False):
        job = load_job(path, [override], resolved=resolved)
        assert isinstance(job, LanguageJob)
        data = job.data
        assert data.source == source
        key, _, value = override.removeprefix("data.").partition("=")
        assert [k for k in ("files", "shards", "name") if getattr(data, k)] == [key]
        assert str(getattr(data, key)) in (value, "['b.txt']")
        assert (data.subset, data.validation_split, data.validation_files) == (None, None, [])
    assert load_job(path, [], resolved=True) != job


def test_an_empty_configuration_of_a_run_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"empty, .*copy the config\.yaml of a checkpoint over it, or remove"):
        load_job(_write(tmp_path, "config.yaml", ""), resolved=True)


def test_the_schema_version_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="schema_version 99; this release reads 1"):
        load_job(_write(tmp_path, "a.yaml", "schema_version: 99\ntask: {type: capt_language}\n"))


RAMP = [[1000, 8], [5000, 24]]


def test_the_ramp_of_a_batch_is_a_function_of_the_step() -> None:
    """Against a loop that counts tokens: steps, samples, and where the size changes."""
    job = load_job("capt_small", [f"batch.ramp={RAMP}", "batch.global=96", "data.sequence_length=50"])
    samples = 0
    for step in range(40):
        tokens = samples * 50
        size = 8 if tokens < 1000 else 24 if tokens < 5000 else 96
        assert (job.batch_sizes.size(step), job.batch_sizes.samples_before(step)) == (size, samples), step
        assert job.batch_sizes.begins_at(step) == (step > 0 and size != job.batch_sizes.size(step - 1))
        samples += size
    assert load_job("capt_small", ["batch.global=96"]).batch_sizes.samples_before(7) == 7 * 96
    tiny = load_job("capt_small", ["batch.ramp=[[1, 8], [2, 16], [3, 32]]", "batch.global=96"])
    assert [stage.batch for stage in tiny.batch_sizes.stages] == [8, 96], "a stage that is over already has no step"


@pytest.mark.parametrize(
    ("job", "overrides", "message"),
    [
        ("capt_small", ["batch.ramp=[[1000, 24], [5000, 8]]", "batch.global=96"], "grow from stage to stage"),
        ("capt_small", ["batch.ramp=[[1000, 96]]", "batch.global=96"], "fewer than batch.global"),
        ("mnli", ["batch.ramp=[[1000, 8]]", "data.path=x", "model.init=x"], "sequences of a glue job have no fixed"),
    ],
)
def test_a_ramp_that_means_nothing_is_refused(job: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_job(job, overrides)


def test_a_stage_that_ranks_cannot_share_is_refused_before_the_first_step() -> None:
    job = load_job("capt_small", ["batch.ramp=[[1000, 8]]", "batch.global=96", "batch.micro=4"])
    assert job.accumulation(8) == 3
    with pytest.raises(ValueError, match=r"batch.ramp 8 leaves one of 16 ranks .* set batch.ramp=16 or more"):
        job.accumulation(16)


def _sections(cls: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    for name, field in cls.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield field.alias or name, field.annotation


def test_removed_keys_of_earlier_versions() -> None:
    """A run that has them at their old defaults is read as it was, and another value is refused with a remedy."""
    needs = {"capt_language": "capt_tiny", "latent": "ptb/vae", "ace": "skipgram", "capt_pairs": "capt_pairs"}
    tried = []
    for task, name in needs.items():
        mapping = load_mapping(name, [] if task in ("capt_language", "latent") else ["data.files=[none]"])
        job = job_from_mapping(mapping, name)
        for section, cls in _sections(type(job)):
            if cls.removed:
                own = {**mapping.get(section, {}), **cls.removed}
                assert job_from_mapping({**mapping, section: own}, name) == job
            for key, value in cls.removed.items():
                tried.append(key)
                other = {**mapping, section: {**mapping.get(section, {}), key: "other"}}
                with pytest.raises(
                    ConfigError, match=rf"{section}: {key} is {value} in every job now, and here 'other'"
                ):
                    job_from_mapping(other, name)
    assert len(set(tried)) == 13


def test_the_digest_of_noise_is_that_of_earlier_versions() -> None:
    """A ledger that an earlier version began continues with the same digests."""
    assert noise_digest(load_job("capt_tiny"), ["corruption"]) == "24cab4d35871020af19895f99f3b2db6"
    assert noise_digest(load_job("capt_vl_small"), ["objectives"]) == "aa6863e85827daf9ef5d1ea4a9476552"
