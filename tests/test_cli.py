"""The command line as a user meets it: mistakes are one message, overrides are typed, files merge."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from parallel_r1.cli import CurriculumCLI, main, stage_names

CONFIGS = Path(__file__).parents[1] / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")
HARD = "--curriculum.stages.hard"


def fails(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run a command that must end with status 2 and one message, without a traceback. Returns the message."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", *args])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


@pytest.mark.integration  # each parses a whole command line: two seconds
@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([f"{HARD}.trainer.max_stepz=5"], ["max_stepz"]),
        (["--curriculum.stages.hrad.trainer.max_steps=5"], ["hrad", "cold_start, easy, hard"]),
        ([f"{HARD}.trainer.max_steps=five"], ["hard.trainer.max_steps", "five"]),
        ([f"{HARD}.trainer.max_steps=-1"], ["hard.trainer.max_steps", "-1"]),
        (["--curriculum.start_at=harder"], ["curriculum.start_at", "harder", "cold_start, easy, hard"]),
        (["--curriculum.checkpoint_every=0"], ["curriculum.checkpoint_every=0", "null"]),
        (["--curriculum.on_change=maybe"], ["on_change", "maybe", "restart"]),
        ([f"{HARD}.module.init_args.generation.top_p=0.9"], ["top_p", "on purpose", "temperature"]),
        ([f"{HARD}.module.init_args.generation.max_tokens=600"], ["stage hard", "max_tokens=600", "context=512"]),
        (["--curriculum.only=harder"], ["curriculum.only", "harder", "cold_start, easy, hard"]),
        ([f"{HARD}.module.init_args.group_size=1"], ["stage hard", "group_size=1", "2 or more"]),
        ([f"{HARD}.module.init_args.generation.structure=unsen"], ["structure", "unsen"]),
        ([f"{HARD}.module.init_args.generation.temperature=0"], ["temperature", "above 0"]),
        ([f"{HARD}.module.init_args.generation.prompt=missing.txt"], ["stage hard", "missing.txt"]),
        ([f"{HARD}.module.init_args.schedule.name=cosin"], ["schedule.name", "cosin", "cosine"]),
        ([f"{HARD}.module.init_args.reward=Acuracy"], ["reward", "Acuracy"]),
        ([f"{HARD}.data.init_args.batch_size=0"], ["batch_size"]),
        ([f"{HARD}.data.init_args.train.medium=10"], ["medium", "easy, hard"]),
        ([f"{HARD}.init_from=nowhere"], ["stage hard", "init_from", "nowhere"]),
        (["--policy.name=somewhere/model"], ["policy.name", "policy.init"]),
        (["--policy.init=null", "--policy.name=./nowhere"], ["policy.name", "./nowhere", "config.json"]),
        (["--engine=TransfomersEngine"], ["engine", "TransfomersEngine"]),
    ],
)
def test_a_mistake_is_one_message_that_names_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: list[str], named: list[str]
) -> None:
    message = fails(capsys, "--config", QUICKSTART, f"--curriculum.root={tmp_path}/run", *args)
    for part in named:
        assert part in message
    assert not (tmp_path / "run").exists(), "something was written before the mistake was found"


def test_a_missing_config_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nope.yaml" in fails(capsys, "--config", "nope.yaml")


def test_a_config_that_is_no_mapping_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    for text in ("- a\n- b\n", "curriculum: {stages: [1]}\n", "a: [\n"):
        bad.write_text(text)
        assert str(bad) in fails(capsys, "--config", str(bad))


def test_no_stage_at_all_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "curriculum.stages" in fails(capsys)


def test_a_missing_data_file_of_a_later_stage_is_found_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "missing.jsonl"
    data = {"class_path": "parallel_r1.data.datamodules.GSM8K", "init_args": {"path": str(path)}}
    over = tmp_path / "over.yaml"
    over.write_text(yaml.safe_dump({"curriculum": {"stages": {"hard": {"data": data}}}}))
    message = fails(capsys, "--config", QUICKSTART, "--config", str(over), f"--curriculum.root={tmp_path}/run")
    assert "stage hard" in message
    assert str(path) in message


def test_truncated_sampling_in_a_file_is_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    over = tmp_path / "over.yaml"
    generation = {"generation": {"top_k": 20}}
    over.write_text(yaml.safe_dump({"curriculum": {"stages": {"hard": {"module": {"init_args": generation}}}}}))
    message = fails(capsys, "--config", QUICKSTART, "--config", str(over))
    assert "there is no top_k, on purpose" in message
    assert str(over) in message


def test_the_plan_alone_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["fit", "--config", QUICKSTART, f"--curriculum.root={tmp_path}/run", "--curriculum.plan_only=true"])
    shown = capsys.readouterr().err
    for part in ("cold_start (SFT)", "hard (RL)", "memory a rank", "disk:"):
        assert part in shown
    assert not (tmp_path / "run").exists()


def begun(root: Path, stage: str) -> None:
    """Leave of a stage what a checkpoint leaves."""
    (root / "stages" / stage / "checkpoints" / "step-00000001").mkdir(parents=True)


def settled(root: Path, *args: str) -> CurriculumCLI:
    cli = configured(f"--curriculum.root={root}", *args)
    cli.settle(cli.curriculum())
    return cli


def test_a_changed_configuration_is_refused_then_taken_on_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    settled(root)
    begun(root, "easy")
    group = "--curriculum.stages.easy.module.init_args.group_size=4"
    message = fails(capsys, "--config", QUICKSTART, f"--curriculum.root={root}", group)
    assert "curriculum.stages.easy.module.init_args.group_size: 8 -> 4" in message
    settled(root, "--curriculum.stages.hard.module.init_args.group_size=4")  # has not begun
    settled(root, group, "--curriculum.on_change=continue", "--curriculum.stages.hard.module.init_args.group_size=4")
    assert "holds from here on" in capsys.readouterr().err
    settled(root, group, "--curriculum.stages.hard.module.init_args.group_size=4")  # now it is the kept one


def test_a_fresh_start_moves_the_old_run_aside(tmp_path: Path) -> None:
    root = tmp_path / "run"
    settled(root)
    begun(root, "easy")
    begun(root, "hard")
    (root / "base").mkdir()
    settled(root, "--curriculum.only=hard", "--curriculum.fresh=true")
    assert (root / "stages/easy").is_dir()
    assert (root / "aside/1/stages/hard/checkpoints").is_dir()
    assert (root / "base").is_dir()
    settled(root, "--curriculum.fresh=true", "--seed_everything=5")
    assert sorted(path.name for path in (root / "aside/2").iterdir()) == ["base", "config.yaml", "stages"]
    assert not any((root / "stages").iterdir())
    kept = yaml.safe_load((root / "config.yaml").read_text())
    assert "fresh" not in kept["curriculum"], "running the kept configuration moves nothing"


def test_ranks_that_a_launcher_started_do_not_move_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"move .*run, or folders of stages in it, out of the way by hand"):
        settled(tmp_path / "run", "--curriculum.fresh=true")


def test_start_at_leaves_earlier_stages_out() -> None:
    assert configured("--curriculum.start_at=easy").curriculum().chosen("fit") == ["easy", "hard"]


def configured(*args: str) -> CurriculumCLI:
    return CurriculumCLI(["fit", "--config", QUICKSTART, *args])


def test_stages_keep_the_order_of_the_file() -> None:
    assert list(configured().curriculum().stages) == ["cold_start", "easy", "hard"]


def test_a_dotted_override_changes_one_typed_value() -> None:
    stages = configured(f"{HARD}.trainer.max_steps=5", f"{HARD}.module.init_args.group_size=4").curriculum().stages
    assert stages["hard"].trainer.max_steps == 5
    assert stages["hard"].module.group_size == 4
    assert stages["easy"].module.group_size == 8


def test_a_second_file_merges_key_by_key(tmp_path: Path) -> None:
    over = tmp_path / "over.yaml"
    over.write_text("curriculum: {stages: {hard: {module: {init_args: {group_size: 3}}}}}\n")
    stages = CurriculumCLI(["fit", "--config", QUICKSTART, "--config", str(over)]).curriculum().stages
    assert list(stages) == ["cold_start", "easy", "hard"]
    assert stages["hard"].module.group_size == 3
    assert type(stages["hard"].module.reward).__name__ == "Alternate"


def test_a_reward_is_swapped_by_name_on_the_command_line() -> None:
    reward = f"{HARD}.module.init_args.reward"
    stages = configured(f"{reward}=parallel_r1.reward.rewards.Tiered", f"{reward}.with_block=1.5").curriculum().stages
    assert type(stages["hard"].module.reward).__name__ == "Tiered"
    assert stages["hard"].module.reward.with_block == 1.5


def test_only_takes_a_name_or_a_list() -> None:
    assert configured("--curriculum.only=hard").curriculum().only == ["hard"]
    assert configured("--curriculum.only=[easy,hard]").curriculum().only == ["easy", "hard"]


def test_print_config_prints_what_can_be_read_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", QUICKSTART, f"{HARD}.trainer.max_steps=7", "--print_config=skip_default"])
    assert stop.value.code == 0
    copy = tmp_path / "copy.yaml"
    copy.write_text(capsys.readouterr().out)
    stages = CurriculumCLI(["fit", "--config", str(copy)]).curriculum().stages
    assert stages["hard"].trainer.max_steps == 7
    assert stages["cold_start"].data.train_sizes == {"easy": 7840, "hard": 160}


def test_the_config_kept_beside_the_results_runs_again(tmp_path: Path) -> None:
    cli = configured(f"{HARD}.trainer.max_steps=7", f"--curriculum.root={tmp_path}", "--curriculum.fresh=true")
    cli.settle(cli.curriculum())
    again = CurriculumCLI(["fit", "--config", str(tmp_path / "config.yaml")]).curriculum()
    assert list(again.stages) == ["cold_start", "easy", "hard"]
    assert again.stages["hard"].trainer.max_steps == 7


def test_stage_names_come_from_all_files_in_order(tmp_path: Path) -> None:
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    a.write_text("curriculum: {stages: {one: {}, two: {}}}\n")
    b.write_text("curriculum: {stages: {two: {}, three: {}}}\n")
    assert stage_names(["fit", "-c", str(a), f"--config={b}"]) == ["one", "two", "three"]
