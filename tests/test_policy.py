"""The policy: sources, tags, folders, and log-probabilities against independent forward passes."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from conftest import tiny_model, tiny_tokenizer, write_tiny_model
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerFast

from parallel_r1.modules.batching import Row, collate
from parallel_r1.policy import Policy, PolicyInit, PolicySource, add_tags, eos_ids_of, export_policy, load_policy
from parallel_r1.structure.grammar import TAGS
from parallel_r1.structure.layout import Positions, layout
from parallel_r1.structure.tokens import TagIds
from parallel_r1.types import PolicyBatch, Rollout

# conftest's vocabulary: <pad> 0, <eos> 1, the tags 2..7, digits, words
PAR, END_PAR, PATH, END_PATH, SUM, END_SUM = range(2, 8)


def row(prompt: tuple[int, ...], response: tuple[int, ...]) -> Row:
    n = len(response)
    return Row(Rollout(prompt, response, (0.0,) * n, (True,) * n, finished=True))


# --------------------------------------------------------------------------- tags


def tagless_tokenizer(words: int = 40) -> PreTrainedTokenizerFast:
    """Knows `<`, `/`, `>`, the three names, some words; no tag is a token."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    pieces = ["<pad>", "<eos>", "<", "</", ">", "Parallel", "Path", "Summary", *(f"w{i}" for i in range(words))]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"</|<|>|\w+|\s"), behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def tables(model: nn.Module) -> list[Tensor]:
    return [model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()]


def tag_rows(table: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    return table[tokenizer.convert_tokens_to_ids(list(TAGS))]


def assert_distinct(rows: Tensor) -> None:
    distances = torch.cdist(rows, rows) + torch.eye(len(rows)) * 1e9
    assert distances.min() > 0.05 * rows.norm(dim=1).median()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [48, 64])  # a vocabulary that is full, and one padded with spare rows
def test_missing_tags_become_one_token_each_with_rows_of_their_own(tied: bool, rows: int) -> None:
    tokenizer, model = tagless_tokenizer(), tiny_model(tied=tied, vocab_size=rows)
    with torch.no_grad():
        for table in tables(model):
            table[48:] = 0.01  # spare rows are all alike
    before = [table.clone() for table in tables(model)]
    assert add_tags(model, tokenizer) == list(TAGS)

    for tag in TAGS:
        assert len(tokenizer(f"w1{tag}w2", add_special_tokens=False).input_ids) == 3
    ids = TagIds.from_tokenizer(tokenizer)
    assert ids.all() == tuple(range(48, 54))
    assert model.config.vocab_size == len(tables(model)[0]) == max(rows, 54)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    for table, old in zip(tables(model), before, strict=True):
        assert torch.equal(table[:48], old[:48])  # every other word keeps its row
        assert_distinct(tag_rows(table, tokenizer))
        # `</Path>` is `</` (3), `Path` (6), `>` (4): their mean, and a part of 0.1 of the typical norm
        part = table[ids.end_path] - old[[3, 6, 4]].mean(dim=0)
        assert part.norm() == pytest.approx(0.1 * float(old.norm(dim=1).median()), rel=1e-4)
    assert model(torch.tensor([[8, 48, 53, 9]])).logits.isfinite().all()


def test_input_and_output_rows_of_a_tag_get_different_parts_when_untied() -> None:
    tokenizer, model = tagless_tokenizer(), tiny_model(tied=False, vocab_size=48)
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(model.get_input_embeddings().weight)
    add_tags(model, tokenizer)
    inputs, outputs = tables(model)
    assert not torch.equal(inputs[48], outputs[48])


@pytest.mark.parametrize("tied", [True, False])
def test_known_tags_with_trained_rows_are_left_alone(tied: bool) -> None:
    tokenizer, model = tiny_tokenizer(), tiny_model(tied=tied)
    before, words = deepcopy(model.state_dict()), len(tokenizer)
    assert add_tags(model, tokenizer) == []
    assert len(tokenizer) == words
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("tied", [True, False])
def test_known_tags_with_identical_spare_rows_are_told_apart(tied: bool) -> None:
    tokenizer, model = tiny_tokenizer(), tiny_model(tied=tied)
    spare = list(range(2, 7))  # five tags share a row; the sixth, `</Summary>`, has one of its own
    with torch.no_grad():
        for table in tables(model):
            table[spare] = table[50].clone()
    before = [table.clone() for table in tables(model)]
    assert add_tags(model, tokenizer) == []
    for table, old in zip(tables(model), before, strict=True):
        assert_distinct(tag_rows(table, tokenizer))
        assert torch.equal(table[7:], old[7:])
        assert torch.equal(table[:2], old[:2])


def test_identical_output_rows_are_told_apart_even_where_input_rows_differ() -> None:
    tokenizer, model = tiny_tokenizer(), tiny_model(tied=False)
    inputs, outputs = tables(model)
    outputs[2:8] = 0.0
    before = inputs.clone()
    add_tags(model, tokenizer)
    assert torch.equal(tables(model)[0], before)
    assert_distinct(tag_rows(tables(model)[1], tokenizer))


def test_some_tags_known_and_some_not() -> None:
    tokenizer, model = tagless_tokenizer(), tiny_model(vocab_size=50)
    tokenizer.add_tokens(["<Path>", "</Path>"], special_tokens=True)
    before = tables(model)[0].clone()
    assert add_tags(model, tokenizer) == [tag for tag in TAGS if "Path" not in tag]
    assert torch.equal(tables(model)[0][:50], before)
    assert_distinct(tag_rows(tables(model)[0], tokenizer))


def test_tags_known_to_the_tokenizer_but_not_to_the_model_get_a_start() -> None:
    tokenizer, model = tagless_tokenizer(), tiny_model(vocab_size=48)
    tokenizer.add_tokens(list(TAGS), special_tokens=True)
    old = tables(model)[0].clone()
    assert add_tags(model, tokenizer) == []
    rows = tag_rows(tables(model)[0], tokenizer)
    assert_distinct(rows)
    near = 0.1 * float(old.norm(dim=1).median())  # as far from the mean row as their own parts are long
    torch.testing.assert_close((rows - old.mean(dim=0)).norm(dim=1), torch.full((6,), near), rtol=1e-4, atol=0)


@pytest.mark.parametrize("rows", [48, 64])
def test_adding_tags_is_deterministic_and_happens_once(rows: int) -> None:
    models = []
    for _ in range(2):
        tokenizer, model = tagless_tokenizer(), tiny_model(vocab_size=rows, tied=False)
        add_tags(model, tokenizer)
        models.append(model)
    for one, other in zip(tables(models[0]), tables(models[1]), strict=True):
        assert torch.equal(one, other)
    before = tables(model)[0].clone()
    assert add_tags(model, tokenizer) == []
    assert torch.equal(tables(model)[0], before)


# --------------------------------------------------------------------------- sources and folders


class Tagless(PolicyInit):
    """A tiny model whose tokenizer has no tags; counts how often it is built."""

    def __init__(self) -> None:
        self.built: list[int] = []

    def build(self, seed: int) -> tuple[nn.Module, PreTrainedTokenizerFast]:
        self.built.append(seed)
        return tiny_model(vocab_size=48, seed=seed), tagless_tokenizer()


@pytest.mark.parametrize("source", [PolicySource(), PolicySource(name="org/model", init=Tagless())])
def test_a_source_is_one_of_name_and_init(source: PolicySource) -> None:
    with pytest.raises(ValueError, match=r"exactly one of `policy\.name` .* and `policy\.init`"):
        source.check()


@pytest.mark.parametrize("name", ["{tmp}", "{tmp}/missing", "./missing", "~/missing"])
def test_a_folder_without_a_model_is_refused_before_loading(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"policy\.name=.*no config\.json there"):
        PolicySource(name=name.format(tmp=tmp_path)).check()


def test_a_hub_id_and_a_model_folder_pass(tiny_model_dir: Path) -> None:
    PolicySource(name="org/model").check()
    PolicySource(name=str(tiny_model_dir)).check()
    PolicySource(init=Tagless()).check()


def test_a_model_that_cannot_be_loaded_is_one_readable_error(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match=r"policy\.name=.* could not be loaded"):
        PolicySource(name=str(tmp_path / "model")).prepare(tmp_path / "start", seed=0)
    assert not (tmp_path / "start").exists()


def test_a_folder_in_the_home_directory_can_be_named_by_tilde(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tiny_model_dir.parent))
    folder = PolicySource(name=f"~/{tiny_model_dir.name}").prepare(tmp_path / "start", seed=0)
    assert (folder / "config.json").is_file()


def test_prepare_adds_the_tags_and_runs_once(tmp_path: Path) -> None:
    init = Tagless()
    source, folder = PolicySource(init=init), tmp_path / "deep" / "start"
    assert source.prepare(folder, seed=3) == folder
    policy = load_policy(folder, source)
    assert policy.tags.all() == tuple(range(48, 54))
    expected, tokenizer = Tagless().build(3)
    add_tags(expected, tokenizer)
    assert all(torch.equal(expected.state_dict()[name], value) for name, value in policy.model.state_dict().items())

    stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    source.prepare(folder, seed=3)
    assert init.built == [3]
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps
    assert [path.name for path in folder.parent.iterdir()] == ["start"]


def test_prepare_that_was_interrupted_starts_over(tmp_path: Path) -> None:
    folder, draft = tmp_path / "start", tmp_path / "start.partial"
    draft.mkdir()
    (draft / "config.json").write_text("{")
    (draft / "leftover.safetensors").write_text("half of it")
    source = PolicySource(init=Tagless())
    source.prepare(folder, seed=0)
    assert not draft.exists()
    assert not (folder / "leftover.safetensors").exists()
    load_policy(folder, source)


def test_a_folder_without_weights_is_not_taken_for_a_policy(tmp_path: Path) -> None:
    folder = tmp_path / "start"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    load_policy(PolicySource(init=Tagless()).prepare(folder, seed=0), PolicySource(init=Tagless()))


def test_a_failed_export_leaves_the_old_folder_whole(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PolicySource(name=str(tiny_model_dir))
    policy = load_policy(source.prepare(tmp_path / "policy", seed=0), source)
    before = {path.name: path.read_bytes() for path in policy.folder.iterdir()}

    def disk_full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(policy.tokenizer, "save_pretrained", disk_full)
    with pytest.raises(OSError, match="no space"):
        export_policy(policy, policy.folder, dict(policy.model.state_dict()))
    assert {path.name: path.read_bytes() for path in policy.folder.iterdir()} == before


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_loads_as_what_was_exported(tmp_path: Path, tied: bool) -> None:
    source = PolicySource(name=str(write_tiny_model(tmp_path / "model", tied=tied)))
    policy = load_policy(source.prepare(tmp_path / "start", seed=0), source)
    weights = {name: value + 0.01 for name, value in policy.model.state_dict().items()}
    export_policy(policy, tmp_path / "end", weights)
    again = load_policy(tmp_path / "end", source)
    assert all(torch.equal(weights[name], value) for name, value in again.model.state_dict().items())
    assert again.tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    assert (again.eos_ids, again.pad_id, again.tags) == (policy.eos_ids, policy.pad_id, policy.tags)


def test_every_end_of_sequence_id_is_found_once_and_survives_an_export(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [9, 8]
    model.config.eos_token_id = [8, 10]
    assert eos_ids_of(model, tokenizer) == (9, 8, 10, 1)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    source = PolicySource(name=str(tmp_path / "model"))
    policy = load_policy(source.prepare(tmp_path / "start", seed=0), source)
    assert policy.eos_ids == (9, 8, 10, 1)
    export_policy(policy, tmp_path / "end", dict(policy.model.state_dict()))
    assert load_policy(tmp_path / "end", source).eos_ids == (9, 8, 10, 1)


def test_a_model_without_an_end_is_refused() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"set eos_token_id in its config\.json"):
        eos_ids_of(model, tokenizer)


def test_rows_are_filled_with_an_end_where_there_is_no_padding_token(tmp_path: Path, tiny_model_dir: Path) -> None:
    folder = PolicySource(name=str(tiny_model_dir)).prepare(tmp_path / "start", seed=0)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("pad_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_policy(folder, PolicySource(name=str(folder))).pad_id == 1


# --------------------------------------------------------------------------- log-probabilities


@pytest.fixture(scope="module")
def policy(tiny_model_dir: Path) -> Policy:
    loaded = load_policy(tiny_model_dir, PolicySource(name=str(tiny_model_dir)))
    loaded.model.eval()
    return loaded


def test_decode_keeps_tags_and_leaves_ends_and_padding_out(policy: Policy) -> None:
    text = policy.decode((20, PAR, PATH, 21, END_PATH, END_PAR, SUM, END_SUM, 1, 0, 0))
    words = policy.tokenizer.convert_ids_to_tokens([20, 21])
    assert text.split() == [words[0], "<Parallel>", "<Path>", words[1], "</Path>", "</Parallel>", *TAGS[4:]]
    assert policy.decode(()) == ""


def plain_logprobs(model: nn.Module, ids: tuple[int, ...], temperature: float = 1.0) -> Tensor:
    """One sequence, no padding, no mask, no positions given: what any Hugging Face user would write."""
    logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


ROWS = [
    row((8, 9, 10), (20, PAR, PATH, 21, 22, END_PATH, PATH, 23, END_PATH, END_PAR, SUM, 24, END_SUM, 25, 1)),
    row((11,), (30,)),
    row((12, 13), ()),
    row((14, PAR, PATH, 15), (31, 32, 1)),
]


@torch.no_grad()
def test_logprobs_of_padded_rows_are_those_of_each_row_alone(policy: Policy) -> None:
    batch = collate(ROWS, policy.tags, policy.pad_id, "seen")
    logp, entropy = policy.logprobs(batch, temperature=0.7)
    assert logp.shape == entropy.shape == batch.input_ids.shape
    assert torch.equal(logp[:, 0], torch.zeros(len(ROWS)))
    for r, one in enumerate(ROWS):
        ids = one.rollout.prompt_ids + one.rollout.response_ids
        torch.testing.assert_close(
            logp[r, 1 : len(ids)], plain_logprobs(policy.model, ids, temperature=0.7), rtol=0, atol=2e-5
        )
    assert (entropy[:, 1:] > 0).all()


@torch.no_grad()
def test_banned_tokens_are_left_out_of_the_distribution(policy: Policy) -> None:
    banned = policy.tags.all()
    batch = collate([row((11, 12), (30, 31, 1))], policy.tags, 0, "sequential", banned=banned)
    logits = policy.model(torch.tensor([[11, 12, 30, 31, 1]])).logits[0, :-1]
    weights = logits.exp()
    weights[:, list(banned)] = 0
    expected = (weights / weights.sum(-1, keepdim=True)).log().gather(-1, torch.tensor([[12], [30], [31], [1]]))[:, 0]
    torch.testing.assert_close(policy.logprobs(batch)[0][0, 1:], expected, rtol=0, atol=2e-5)


@torch.no_grad()
def isolated_logprobs(
    model: nn.Module, prompt: tuple[int, ...], response: tuple[int, ...], scheme: Positions
) -> Tensor:
    """Unseen without any mask, for a response of one block. Returns [T - 1], from the second token on.

    A causal forward of the text before the block; one for each path on a copy of its keys and values; one of what
    follows on the keys and values of all paths put side by side.
    """
    ids = prompt + response
    where = layout(len(prompt), response, TagIds(PAR, END_PAR, PATH, END_PATH, SUM, END_SUM), "unseen", scheme)
    first = where.path.index(0)
    last = max(i for i, p in enumerate(where.path) if p >= 0)
    path_ranges = [[i for i, p in enumerate(where.path) if p == k] for k in range(max(where.path) + 1)]
    assert sorted(i for r in path_ranges for i in r) == list(range(first, last + 1))  # nothing strays in between

    def forward(at: list[int], cache: DynamicCache) -> Tensor:
        positions = torch.tensor([[where.positions[i] for i in at]])
        inputs = torch.tensor([[ids[i] for i in at]])
        return model(inputs, position_ids=positions, past_key_values=cache).logits[0]

    logits = torch.zeros(len(ids), model.config.vocab_size)
    trunk = DynamicCache()
    logits[:first] = forward(list(range(first)), trunk)
    branches = []
    for at in path_ranges:
        branch = deepcopy(trunk)
        logits[at] = forward(at, branch)
        branches.append(branch)
    joined = DynamicCache()
    for layer in range(model.config.num_hidden_layers):
        keys = [trunk.layers[layer].keys, *(b.layers[layer].keys[:, :, first:] for b in branches)]
        values = [trunk.layers[layer].values, *(b.layers[layer].values[:, :, first:] for b in branches)]
        joined.update(torch.cat(keys, dim=2), torch.cat(values, dim=2), layer)
    tail = list(range(last + 1, len(ids)))
    logits[tail] = forward(tail, joined)
    return logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


BLOCK = (20, PAR, PATH, 21, 22, END_PATH, PATH, 23, END_PATH, PATH, END_PATH, END_PAR, SUM, 24, END_SUM, 25, 26, 1)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("scheme", ["longest", "index"])
def test_unseen_logprobs_are_those_of_paths_run_apart(tiny_model_dir: Path, attention: str, scheme: Positions) -> None:
    policy = load_policy(tiny_model_dir, PolicySource(name=str(tiny_model_dir), attn_implementation=attention))
    policy.model.eval()
    plain = load_policy(tiny_model_dir, PolicySource(name=str(tiny_model_dir))).model.eval()
    # the second row is longer, so the first is padded
    batch = collate([row((8, 9), BLOCK), row((8, 9, 10, PAR), BLOCK)], policy.tags, policy.pad_id, "unseen", scheme)
    logp = policy.logprobs(batch)[0]
    for r, prompt in enumerate([(8, 9), (8, 9, 10, PAR)]):
        expected = isolated_logprobs(plain, prompt, BLOCK, scheme)
        torch.testing.assert_close(logp[r, 1 : 1 + len(expected)], expected, rtol=0, atol=2e-5)
    # the check can fail: plain causal attention gives other numbers in the second path, and after the block
    causal = plain_logprobs(plain, (8, 9, *BLOCK))
    gap = (logp[0, 1 : 1 + len(causal)] - causal).abs()
    assert gap[:6].max() < 2e-5  # up to the first token of the first path
    assert gap[9:].max() > 0.1


def test_attention_that_cannot_isolate_paths_is_refused(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never silently causal: a kernel that ignores the mask must not be handed one."""
    batch: PolicyBatch = collate([row((8,), BLOCK)], policy.tags, policy.pad_id, "unseen")
    monkeypatch.setattr(policy.model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ValueError, match=r"attn_implementation='flash_attention_2' cannot isolate paths: choose sdpa"):
        policy.logits(batch)


def test_pieces_are_the_texts_of_tokens_alone(tiny_model_dir: Path) -> None:
    policy = load_policy(tiny_model_dir, PolicySource(name=str(tiny_model_dir)))
    assert policy.pieces([policy.tags.parallel, 8, 1]) == ["<Parallel>", "0", "<eos>"]
