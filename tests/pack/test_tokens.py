import json
import re
from dataclasses import replace

import pytest

from leadline.core.canonical import canonical_bytes
from leadline.core.errors import IntegrityError
from leadline.core.manifest import Manifest, build_manifest
from leadline.pack.tokens import read_token_facts, recount, token_problems


def _facts(shards, path="manifest.json"):
    return read_token_facts((shards / "manifest.json").read_bytes(), path)


def _files(shards):
    return {entry.path: entry for entry in build_manifest(shards).files}


def _edited(shards, change):
    document = json.loads((shards / "manifest.json").read_bytes())
    change(document)
    return read_token_facts(canonical_bytes(document), "manifest.json")


def test_facts_are_those_the_shards_manifest_states(shards):
    facts = _facts(shards)
    assert (facts.train_tokens, facts.eval_tokens) == (300, 20)
    assert (facts.vocab_size, facts.dtype) == (257, "uint16")


def test_sound_shards_have_no_problems(shards):
    assert token_problems(_facts(shards), _files(shards)) == []


def test_shards_in_a_subfolder_are_found_below_it(shards):
    files = {
        f"data/{path}": replace(entry, path=f"data/{path}")
        for path, entry in _files(shards).items()
    }
    assert token_problems(_facts(shards, "data/manifest.json"), files) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d["splits"]["train"]["shards"][0].update(tokens=299), "where .* counts 299"),
        (lambda d: d["splits"]["train"].update(tokens=301), "states 301 train tokens"),
        (lambda d: d["splits"]["eval"].update(tokens=0), "states 0 eval tokens"),
        (lambda d: d.update(dtype="uint32"), "holds 150 tokens of uint32"),
        (lambda d: d.update(dtype="int8"), "dtype 'int8'"),
        (lambda d: d["splits"]["eval"]["shards"][0].update(sha256="0" * 64), "is not the file"),
        (lambda d: d["splits"]["eval"]["shards"][0].update(bytes=41), "is not the file"),
        (lambda d: d["splits"]["train"]["shards"][0].update(documents=2), "does not fit its doc"),
        (lambda d: d["tokenizer"].update(sha256="0" * 64), "is not the tokenizer"),
        (lambda d: d["splits"]["train"].update(d["splits"]["eval"]), "lies elsewhere"),
        (lambda d: d["splits"]["train"].update(d["splits"]["eval"]), "also an eval shard"),
        (lambda d: d["splits"]["train"].update(shards=[], tokens=0), "does not list it"),
    ],
)
def test_shards_manifest_that_does_not_follow_from_its_files_is_named(shards, change, named):
    problems = token_problems(_edited(shards, change), _files(shards))
    assert any(re.search(named, problem) for problem in problems), problems


def test_shard_that_is_missing_is_named(shards):
    files = _files(shards)
    del files["train/shard-00000.idx"]
    (problem,) = token_problems(_facts(shards), files)
    assert problem == "train/shard-00000.idx is missing and manifest.json lists it"


@pytest.mark.parametrize("data", [b"", b"not JSON", b"[]", b'{"name":"an npm package"}', b"\xff"])
def test_somebody_elses_manifest_is_no_business_of_ours(data):
    assert read_token_facts(data, "manifest.json") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["splits"].pop("eval"),
        lambda d: d["tokenizer"].pop("vocab_size"),
        lambda d: d["splits"]["train"].update(tokens="300"),
        lambda d: d["splits"]["train"].update(tokens=-1),
        lambda d: d["splits"]["train"]["shards"].append("shard"),
        lambda d: d["splits"]["train"]["shards"][0].pop("bytes"),
        lambda d: d["splits"]["train"]["shards"][0].update(path=3),
        lambda d: d.update(dtype=2),
        lambda d: d.update(splits=[]),
    ],
)
def test_malformed_shards_manifest_is_refused(shards, change):
    with pytest.raises(IntegrityError, match=r"manifest\.json is a malformed"):
        _edited(shards, change)


def test_reformatted_shards_manifest_is_refused(shards):
    document = json.loads((shards / "manifest.json").read_bytes())
    with pytest.raises(IntegrityError, match="not its canonical form"):
        read_token_facts(json.dumps(document, indent=1).encode(), "manifest.json")


def test_recount_against_a_manifest_that_states_other_counts_is_red(shards):
    stated = [{**_facts(shards).document, "train_tokens": 3000}]
    manifest = Manifest(files=build_manifest(shards).files, extra={"tokens": stated})
    data = {"manifest.json": (shards / "manifest.json").read_bytes()}
    (problem,) = recount(data, manifest)[1]
    assert problem == "the manifest states other token counts than the shards hold"


def test_recount_of_a_malformed_shards_manifest_is_red(shards):
    data = {"manifest.json": b'{"splits": 1, "tokenizer": 2}'}
    facts, problems = recount(data, build_manifest(shards))
    assert facts == ()
    assert "not its canonical form" in problems[0]


def test_recount_of_shards_made_by_data_pack_agrees(tmp_path):
    from leadline.data.prepare import pack_text

    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number} of real text\n" * 9)
    made = pack_text(tmp_path / "text", tmp_path / "made", tokenizer="bytes", eval_fraction="0.3")
    data = (tmp_path / "made/manifest.json").read_bytes()
    facts, problems = recount({"manifest.json": data}, build_manifest(tmp_path / "made"))
    assert problems == []
    assert (facts[0].train_tokens, facts[0].eval_tokens) == (made.train.tokens, made.eval.tokens)
