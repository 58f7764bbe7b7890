"""Adapters through the whole main path: kept as they are, merged as PEFT computes, given back byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from adapters import KINDS, VOCABULARY, Made, load_base, logits_of, make_adapter, make_base, merge_by_us, peft_logits
from checkpoints import fine_tune, random_checkpoint, read_weights
from interruptions import PASS_2, Interrupting
from pipeline_runs import Recording, asked, back, contents, manifest, record, run
from safetensors.torch import load_file, save_file

from mfs_decompose.artifact.reader import Family
from mfs_decompose.artifact.verify import verify
from mfs_decompose.errors import ArtifactInvalid, MfsError, SourceIncompatible, UsageError
from mfs_decompose.events import NullSink
from mfs_decompose.pipeline.against import compare_with_originals
from mfs_decompose.pipeline.decompose import decompose
from mfs_decompose.pipeline.merge_folder import write_merge
from mfs_decompose.pipeline.prepare import prepare
from mfs_decompose.plan.summary import summarise
from mfs_decompose.source.checkpoint import open_checkpoint

_LIMIT = 1e-4
_CHOSEN = (
    "linear", "rslora", "patterns", "conv1d", "saved", "grown", "lora_bias", "dora", "dora_conv1d", "embedding",
    "tied_head", "tied_saved_both", "tied_grown", "tokens", "experts", "mixtral_experts", "old_experts",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    root = tmp_path_factory.mktemp("adapters")
    return {kind: make_adapter(root / kind, kind) for kind in _CHOSEN}


@pytest.fixture(scope="module")
def oracle(made: dict[str, Made], tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return peft_logits(made, tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="module")
def artifacts(made: dict[str, Made], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("artifacts")
    for kind, one in made.items():
        run(root / kind, one.base, {"tuned": one.adapter})
    return {kind: root / kind for kind in made}


@pytest.mark.parametrize("kind", _CHOSEN)
def test_the_fp32_restore_computes_what_peft_does(
    kind: str, artifacts: dict[str, Path], oracle: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    restored, _ = back(artifacts[kind], "tuned", tmp_path / "out", dtype="float32")
    found = logits_of(restored.folder)
    assert (found - oracle[kind]).abs().max() <= _LIMIT
    assert oracle[kind].abs().max() > 0.1  # else the limit would say nothing


@pytest.mark.parametrize("kind", _CHOSEN)
def test_the_adapter_comes_back_byte_for_byte(
    kind: str, artifacts: dict[str, Path], made: dict[str, Made], tmp_path: Path
) -> None:
    restored, _ = back(artifacts[kind], "tuned", tmp_path / "out", form="adapter")
    assert restored.exact and restored.checked
    assert contents(restored.folder) == contents(made[kind].adapter)


@pytest.mark.parametrize("kind", _CHOSEN)
def test_it_costs_its_own_bytes(kind: str, artifacts: dict[str, Path], made: dict[str, Made]) -> None:
    variant = record(artifacts[kind], "tuned")
    own, base = (
        sum(t.numel() * t.element_size() for t in weights.values())
        for weights in (load_file(made[kind].adapter / "adapter_model.safetensors"), read_weights(made[kind].base))
    )
    assert variant["checkpoint_bytes"] == base
    headers = variant["bytes"] - own
    assert 0 < headers < 120 * len(variant["adapter"]["tensors"]) + 256
    assert {t["tree"]["codec"] for t in variant["tensors"].values()} <= {"adapter", "identical", "alias"}


@pytest.mark.parametrize("kind", ["linear", "dora", "tied_grown", "experts"])
def test_every_value_is_proven(kind: str, artifacts: dict[str, Path]) -> None:
    assert verify(artifacts[kind], "values").ok


def test_the_default_restore_loads_in_the_dtype_of_the_base(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama", torch.bfloat16)
    one = make_adapter(tmp_path, "saved_embeddings", base)
    run(tmp_path / "art", base, {"tuned": one.adapter})
    restored, weights = back(tmp_path / "art", "tuned", tmp_path / "out")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    served = read_weights(back(tmp_path / "art", "tuned", tmp_path / "served", dtype="float32")[0].folder)
    for name, weight in weights.items():
        gap = (weight.float() - served[name]).abs()
        assert bool((gap <= served[name].abs() * 2.0**-7).all()), name
    logits_of(restored.folder)
    assert not restored.exact


def test_a_changed_config_goes_with_the_weights(artifacts: dict[str, Path], tmp_path: Path) -> None:
    restored, weights = back(artifacts["tied_grown"], "tuned", tmp_path / "out")
    config = json.loads((restored.folder / "config.json").read_text())
    assert config["vocab_size"] == VOCABULARY + 3
    assert config["tie_word_embeddings"] is False
    assert weights["lm_head.weight"].shape[0] == weights["model.embed_tokens.weight"].shape[0] == VOCABULARY + 3
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_the_base_is_left_as_it_was(artifacts: dict[str, Path], made: dict[str, Made], tmp_path: Path) -> None:
    restored, _ = back(artifacts["tied_grown"], "base", tmp_path / "out")
    assert contents(restored.folder) == contents(made["tied_grown"].base)


def test_files_of_the_adapter_go_before_the_bases(made: dict[str, Made], tmp_path: Path) -> None:
    adapter = Path(shutil.copytree(made["linear"].adapter, tmp_path / "adapter"))
    base = Path(shutil.copytree(made["linear"].base, tmp_path / "base"))
    (base / "tokenizer_config.json").write_text('{"of": "base"}')
    (base / "README.md").write_text("base")
    (base / "special_tokens_map.json").write_text("{}")
    (adapter / "tokenizer_config.json").write_text('{"of": "adapter"}')
    (adapter / "chat_template.jinja").write_text("{{ x }}")
    run(tmp_path / "art", base, {"tuned": adapter})
    folder = back(tmp_path / "art", "tuned", tmp_path / "out")[0].folder
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {"of": "adapter"}
    assert (folder / "chat_template.jinja").exists() and (folder / "special_tokens_map.json").exists()
    assert not (folder / "adapter_config.json").exists() and not (folder / "README.md").exists()


def test_a_sharded_base_keeps_its_files_and_takes_what_is_new(tmp_path: Path) -> None:
    one = make_adapter(tmp_path, "tied_head")
    sharded = tmp_path / "sharded"
    load_base(one.base).save_pretrained(sharded, max_shard_size="12KB")
    before = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    run(tmp_path / "art", sharded, {"tuned": one.adapter})
    restored, weights = back(tmp_path / "art", "tuned", tmp_path / "out")
    after = json.loads((restored.folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(after) - set(before) == {"lm_head.weight"}
    assert all(after[name] == before[name] for name in before)
    assert set(weights) == set(after)
    logits_of(restored.folder)


def test_beside_whole_checkpoints_and_in_any_order(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama", torch.bfloat16)
    one = make_adapter(tmp_path, "linear", base)
    whole = fine_tune(base, tmp_path / "whole", seed=5)
    run(tmp_path / "a", base, {"whole": whole, "lora": one.adapter})
    run(tmp_path / "b", base, {"lora": one.adapter, "whole": whole}, threads=2)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert record(tmp_path / "a", "whole").get("adapter") is None
    alone = back(tmp_path / "a", "whole", tmp_path / "out")[0]
    assert verify(tmp_path / "a", "values").ok and alone.checked


def test_the_same_command_again_writes_nothing(made: dict[str, Made], artifacts: dict[str, Path]) -> None:
    before = {path: path.stat().st_mtime_ns for path in artifacts["dora"].rglob("*")}
    report = run(artifacts["dora"], made["dora"].base, {"tuned": made["dora"].adapter})
    assert not report.written
    assert before == {path: path.stat().st_mtime_ns for path in artifacts["dora"].rglob("*")}


def test_it_is_held_against_its_original(made: dict[str, Made], artifacts: dict[str, Path], tmp_path: Path) -> None:
    (found,) = compare_with_originals(
        artifacts["linear"], {"tuned": str(made["linear"].adapter)}, base=None, progress=NullSink()
    )
    assert found.ok and found.rel_error == 0.0 and found.exact == found.tensors
    other = make_adapter(tmp_path, "rslora", made["linear"].base)
    with pytest.raises(SourceIncompatible, match="not the checkpoint that variant 'tuned' was made from"):
        compare_with_originals(artifacts["linear"], {"tuned": str(other.adapter)}, base=None, progress=NullSink())


def test_its_original_is_merged_from_the_sources_alone(made: dict[str, Made], tmp_path: Path) -> None:
    one = made["tied_saved_both"]
    write_merge(open_checkpoint(one.adapter, "a"), open_checkpoint(one.base, "base"), tmp_path / "m", NullSink())
    ours = merge_by_us(one, tmp_path / "slow")
    mine, theirs = read_weights(tmp_path / "m"), read_weights(ours)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and config.get("dtype", config.get("torch_dtype")) == "float32"


def test_a_budget_says_nothing_about_it_and_that_is_said(made: dict[str, Made], tmp_path: Path) -> None:
    sink = Recording()
    one = made["linear"]
    report = run(tmp_path / "art", one.base, {"tuned": one.adapter}, {"objective.budget": "1%"}, sink)
    assert report.variants[0].footprint > 0.01
    assert any("kept as it is, whatever the budget" in note for note, _ in sink.notes)


def test_the_dry_run_tells_its_bytes(made: dict[str, Made], tmp_path: Path) -> None:
    one = made["linear"]
    prepared = prepare(asked(tmp_path / "art", one.base, {"tuned": one.adapter}))
    (estimated,) = prepared.estimate.variants
    report = run(tmp_path / "art", one.base, {"tuned": one.adapter})
    assert report.variants[0].bytes <= estimated.bytes < report.variants[0].bytes * 1.5


class TestWhatIsRefused:
    def test_an_adapter_without_a_base(self, made: dict[str, Made], tmp_path: Path) -> None:
        one = made["linear"]
        with pytest.raises(SourceIncompatible, match="'b' is an adapter, and an adapter is nothing without") as caught:
            run(tmp_path / "art", None, {"a": one.base, "b": one.adapter})
        assert "--base" in (caught.value.hint or "")
        assert not (tmp_path / "art").exists()

    def test_a_broken_one_before_any_work(self, made: dict[str, Made], tmp_path: Path) -> None:
        adapter = Path(shutil.copytree(made["linear"].adapter, tmp_path / "adapter"))
        tensors = load_file(adapter / "adapter_model.safetensors")
        name = next(iter(tensors))
        tensors[name][0, 0] = torch.inf
        save_file(tensors, adapter / "adapter_model.safetensors")
        with pytest.raises(SourceIncompatible, match=r"is broken: 0 of its .* NaN and 1 infinite"):
            run(tmp_path / "art", made["linear"].base, {"tuned": adapter})
        assert not (tmp_path / "art").exists()

    def test_a_whole_checkpoint_as_an_adapter(self, tmp_path: Path) -> None:
        base = random_checkpoint(tmp_path / "base", {"w": torch.ones(9, 8)})
        run(tmp_path / "art", base, {"v": base})
        for id in ("v", "base"):
            with pytest.raises(UsageError, match="expected a variant that was given as an adapter"):
                back(tmp_path / "art", id, tmp_path / "out", form="adapter")

    def test_an_adapter_in_another_dtype(self, artifacts: dict[str, Path], tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="given back as it was"):
            back(artifacts["linear"], "tuned", tmp_path / "out", form="adapter", dtype="float32")

    def test_exact_only_where_it_is(self, artifacts: dict[str, Path], tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="expected all") as caught:
            back(artifacts["linear"], "tuned", tmp_path / "out", exact=True)
        assert "--dtype float32" in (caught.value.hint or "")
        back(artifacts["linear"], "tuned", tmp_path / "out", exact=True, dtype="float32")


class TestDamage:
    """One flipped bit of an adapter is found by every reader that meets it."""

    @pytest.fixture
    def flipped(self, artifacts: dict[str, Path], tmp_path: Path) -> Path:
        folder = Path(shutil.copytree(artifacts["linear"], tmp_path / "art"))
        (shard,) = record(folder, "tuned")["shards"]
        data = bytearray((folder / shard).read_bytes())
        data[-5] ^= 1
        (folder / shard).write_bytes(data)
        return folder

    @pytest.mark.parametrize("options", [{}, {"form": "adapter"}, {"dtype": "float32"}])
    def test_restoring(self, flipped: Path, options: dict[str, str], tmp_path: Path) -> None:
        with pytest.raises(ArtifactInvalid, match="damaged"):
            back(flipped, "tuned", tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    def test_verifying(self, flipped: Path) -> None:
        assert not verify(flipped).ok

    def test_a_manifest_that_lies(self, artifacts: dict[str, Path]) -> None:
        with Family.open(artifacts["linear"]) as family:
            adapter = family.variant("tuned").adapter
            assert adapter is not None
            name = next(iter(adapter.tensors))
            shorter = adapter.tensors[name].model_copy(update={"shape": (1,)})
            lying = adapter.model_copy(update={"tensors": {**adapter.tensors, name: shorter}})
            from mfs_decompose.artifact.manifest import seal

            wrong = family.manifest.variants[0].model_copy(update={"adapter": lying})
            with pytest.raises(ArtifactInvalid, match="bytes of"):
                seal(family.manifest.model_copy(update={"variants": (wrong,)}))


def test_a_kill_after_the_passes_is_taken_up(made: dict[str, Made], tmp_path: Path) -> None:
    one = made["dora"]
    run(tmp_path / "whole", one.base, {"tuned": one.adapter})
    for at, stage in enumerate((PASS_2, "writing shards")):
        out = tmp_path / str(at)
        with pytest.raises(KeyboardInterrupt):
            decompose(asked(out, one.base, {"tuned": one.adapter}), Interrupting(stage))
        assert not out.exists()
        run(out, one.base, {"tuned": one.adapter})
        assert contents(out) == contents(tmp_path / "whole")


def test_every_kind_there_is_resolves(tmp_path: Path) -> None:
    """The kinds not chosen above at least are taken, or refused by name."""
    for kind in sorted(KINDS.keys() - set(_CHOSEN)):
        one = make_adapter(tmp_path / kind, kind)
        try:
            run(tmp_path / kind / "art", one.base, {"tuned": one.adapter})
        except MfsError as error:
            pytest.fail(f"{kind}: {error.message}")
        assert manifest(tmp_path / kind / "art")["coverage"]["tensors"] > 0


class TestNumbersBeyondADtype:
    """Half the exponent range of the base: what fp16 cannot hold is said, and fp32 keeps it."""

    @pytest.fixture
    def overflowing(self, tmp_path: Path) -> tuple[Path, Path]:
        base = make_base(tmp_path / "base", "llama", torch.float16)
        one = make_adapter(tmp_path, "linear", base)
        tensors = load_file(one.adapter / "adapter_model.safetensors")
        for name in tensors:
            if "layers.0.self_attn.q_proj" in name:
                tensors[name] = tensors[name] * 1000
        save_file(tensors, one.adapter / "adapter_model.safetensors")
        return base, one.adapter

    def test_it_is_said_and_nothing_is_infinite(self, overflowing: tuple[Path, Path], tmp_path: Path) -> None:
        sink = Recording()
        base, adapter = overflowing
        run(tmp_path / "art", base, {"tuned": adapter}, sink=sink)
        (note,) = [text for text, _ in sink.notes if "beyond the base's dtype" in text]
        assert "--dtype float32" in note and "q_proj" in note
        _, weights = back(tmp_path / "art", "tuned", tmp_path / "out")
        assert all(bool(torch.isfinite(weight).all()) for weight in weights.values())


def test_a_dry_run_counts_the_tensors_of_the_merge(made: dict[str, Made], tmp_path: Path) -> None:
    for kind in ("tied_head", "linear"):
        one = made[kind]
        request = asked(tmp_path / "art", one.base, {"tuned": one.adapter})
        prepared = prepare(request)
        document = summarise(prepared.plan, prepared.estimate, prepared.base, prepared.variants, request.out)
        assert document["coverage"]["tensors"] == document["coverage"]["planned"]


def test_a_float32_restore_is_called_exact(artifacts: dict[str, Path], tmp_path: Path) -> None:
    assert back(artifacts["linear"], "tuned", tmp_path / "a", dtype="float32")[0].exact
    assert not back(artifacts["saved"], "tuned", tmp_path / "b", layout="single")[0].exact


def test_damage_is_placed_in_the_adapters_shard(artifacts: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(artifacts["linear"], tmp_path / "art"))
    (shard,) = record(folder, "tuned")["shards"]
    data = bytearray((folder / shard).read_bytes())
    data[-9] ^= 1
    (folder / shard).write_bytes(data)
    assert {problem.file for problem in verify(folder, "values").problems} == {shard}
