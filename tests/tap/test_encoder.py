import json
import sys

import pytest

from leadline.core.errors import DataError, UsageError
from leadline.tap.documents import Chat, Document
from leadline.tap.encoder import DocumentEncoder

START, END = 50, 51
WITH_START = "{{ bos_token }}{% for m in messages %} {{ m['content'] }}{% endfor %}"
WITHOUT_START = "{% for m in messages %} {{ m['content'] }}{% endfor %}"


@pytest.fixture
def write_tokenizer(tmp_path):
    """Write a tokenizer of words t0 to t49 that puts <s> before text and </s> behind it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    def write(*, around="<s> $A", template=None, **settings):
        words = {f"t{number}": number for number in range(START)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens(["<s>", "</s>"])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=around, special_tokens=[("<s>", START), ("</s>", END)]
        )
        # What a saved file may hold from training; a calibration text is never cut or filled.
        tokenizer.enable_truncation(3)
        tokenizer.enable_padding(length=8)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        settings |= {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return tmp_path

    return write


def texts(*values):
    return [Document(origin=f"c.jsonl:{i}", content=value) for i, value in enumerate(values, 1)]


def chat(*contents):
    messages = [{"role": "user", "content": content} for content in contents]
    return Document(origin="c.jsonl:1", content=Chat(messages=messages))


@pytest.mark.parametrize(
    ("around", "ids"),
    [
        ("$A", [1, 2, 3, 4]),
        ("<s> $A", [START, 1, 2, 3, 4]),
        ("$A </s>", [1, 2, 3, 4, END]),
        ("<s> $A </s>", [START, 1, 2, 3, 4, END]),
    ],
)
def test_text_gets_the_tokens_its_tokenizer_adds_and_is_neither_cut_nor_filled(
    write_tokenizer, around, ids
):
    encoder = DocumentEncoder.open(write_tokenizer(around=around))
    short = [9 if number == 1 else number for number in ids if number not in (2, 3, 4)]
    assert encoder.encode(texts("t1 t2 t3 t4", "t9")) == [ids, short]


@pytest.mark.parametrize("text", ["<s> t1", "t1 </s>", "<s> t1 </s>", "t1"])
def test_t41_text_that_spells_start_or_end_has_each_once(write_tokenizer, text):
    encoder = DocumentEncoder.open(write_tokenizer(around="<s> $A </s>"))
    assert encoder.encode(texts(text)) == [[START, 1, END]]
    assert encoder.spelled_marks == (text != "t1")


@pytest.mark.parametrize("template", [WITH_START, WITHOUT_START])
@pytest.mark.parametrize("around", ["<s> $A", "<s> $A </s>"])
def test_t41_chat_has_exactly_one_start_token(write_tokenizer, template, around):
    encoder = DocumentEncoder.open(write_tokenizer(around=around, template=template))
    assert encoder.encode([chat("t1 t2", "t3")]) == [[START, 1, 2, 3]]
    assert encoder.spelled_marks == 0


@pytest.mark.parametrize(("template", "start"), [(WITH_START, [START]), (WITHOUT_START, [])])
def test_t41_chat_gets_no_start_token_that_neither_template_nor_tokenizer_has(
    write_tokenizer, template, start
):
    encoder = DocumentEncoder.open(write_tokenizer(around="$A", template=template))
    assert encoder.encode([chat("t1")]) == [[*start, 1]]


def test_chat_gives_the_ids_of_the_library_where_the_template_writes_the_start(write_tokenizer):
    from transformers import AutoTokenizer

    folder = write_tokenizer(template=WITH_START, tokenizer_class="PreTrainedTokenizerFast")
    wanted = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        chat("t1 t2", "t3").content.messages, return_dict=False
    )
    assert DocumentEncoder.open(folder).encode([chat("t1 t2", "t3")]) == [wanted]


def test_chat_shows_the_template_its_tools(write_tokenizer):
    template = "{% for tool in tools %}{{ tool.name }} {% endfor %}" + WITHOUT_START
    encoder = DocumentEncoder.open(write_tokenizer(around="$A", template=template))
    content = Chat(messages=[{"role": "user", "content": "t1"}], tools=[{"name": "t7"}])
    assert encoder.encode([Document(origin="c", content=content)]) == [[7, 1]]


def test_encode_gives_no_ids_where_there_is_nothing_to_read(write_tokenizer):
    encoder = DocumentEncoder.open(write_tokenizer(template=WITH_START))
    assert encoder.encode([*texts("", " \n", "t1"), chat()]) == [[], [], [START, 1], []]


@pytest.mark.parametrize("settings", [{}, {"tokenizer_class": "Qwen2Tokenizer"}])
def test_tokenizer_json_is_taken_as_it_is_whatever_class_is_named(write_tokenizer, settings):
    folder = write_tokenizer(around="$A", **settings)
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    if not settings:
        (folder / "tokenizer_config.json").unlink()
    assert DocumentEncoder.open(folder).encode(texts("t1 t2")) == [[1, 2]]


def test_tokenizer_of_older_files_is_opened_by_its_class(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<unk>": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert DocumentEncoder.open(tmp_path).encode(texts("abba")) == [[2, 1, 0]]


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        (None, "chat template"),
        ("{% for", "TemplateSyntaxError"),
    ],
)
def test_chat_that_its_template_refuses_is_named(write_tokenizer, bad, told):
    encoder = DocumentEncoder.open(write_tokenizer(template=bad))
    with pytest.raises(DataError, match=rf"c\.jsonl:1 does not go through.*{told}"):
        encoder.encode([chat("t1")])


def test_text_that_the_tokenizer_refuses_is_named_among_its_neighbours(write_tokenizer):
    encoder = DocumentEncoder.open(write_tokenizer())
    with pytest.raises(DataError, match=r"c\.jsonl:2 cannot be tokenised"):
        encoder.encode(texts("t1", "half \ud800", "t2"))


def test_folder_without_a_tokenizer_is_refused_with_what_to_give(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"holds no tokenizer.*\.npy"):
        DocumentEncoder.open(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
def test_tokenizer_that_is_damaged_is_refused_with_its_file(tmp_path, name):
    (tmp_path / name).write_text('{"version": ')
    with pytest.raises(DataError, match=rf"{name}\) cannot be opened"):
        DocumentEncoder.open(tmp_path)


def test_digest_follows_every_file_that_changes_the_ids(write_tokenizer):
    digests = [DocumentEncoder.open(write_tokenizer()).digest for _ in range(2)]
    digests.append(DocumentEncoder.open(write_tokenizer(around="$A")).digest)
    digests.append(DocumentEncoder.open(write_tokenizer(around="$A", template=WITH_START)).digest)
    folder = write_tokenizer(around="$A", template=WITH_START)
    (folder / "chat_template.jinja").write_text(WITHOUT_START)
    digests.append(DocumentEncoder.open(folder).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_importing_the_encoder_does_not_import_transformers():
    import subprocess

    code = "import sys, leadline.tap.corpus; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
