import random
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.pack.rules import find_secrets, looks_random, secret_file_kind

# Every secret is put together here, so that this file holds none itself.
_MARKED = {
    "aws-key-id": "AKIA" + "ABCDEFGH23456777",
    "gcp-api-key": "AIza" + "Sy" + "aB3" * 11,
    "gcp-oauth-token": "ya29." + "aB3_" * 8,
    "gcp-client-secret": "GOCSPX-" + "aB3_" * 7,
    "azure-account-key": "AccountKey=" + "aB3+" * 21 + "aB==",
    "azure-access-key": "SharedAccessKey=" + "aB3+" * 11,
    "azure-sas-signature": "?sv=2022&sig=" + "aB3%" * 11 + "%3D",
    "github-token": "ghp_" + "aB3" * 12,
    "gitlab-token": "glpat-" + "aB3_" * 5,
    "huggingface-token": "hf_" + "aBc" * 12,
    "openai-style-key": "sk-" + "aB3" * 16,
    "slack-token": "xoxb-" + "1234567890-abc",
    "slack-webhook": "https://hooks.slack.com/" + "services/T00000000/B00000000/" + "aB3" * 8,
    "stripe-key": "sk_live_" + "aB3" * 8,
    "package-index-token": "pypi-" + "AgEIcHlwaS5vcmc" * 6,
    "json-web-token": "eyJ" + "hbGciOiJIUzI1" + ".eyJ" + "zdWIiOiIxMjM0" + "." + "aB3" * 8,
    "bearer-token": "Authorization: " + "Bearer " + "aB3dE5fG7hI9jK1lM3nO",
}
_KEY_LINE = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7\n"


def _kinds(text, path="code/x.py"):
    return sorted({kind for _, kind in find_secrets(text.encode(), path)})


@pytest.mark.parametrize(("kind", "secret"), _MARKED.items())
@pytest.mark.parametrize("frame", ["{}", 'x = "{}"', '"line\\n{}"', "- {}\n"])
def test_marked_secret_is_found_wherever_it_stands(kind, secret, frame):
    assert kind in _kinds(frame.format(secret))


def test_marked_secret_is_found_at_its_offset():
    text = b"first line\n" + _MARKED["github-token"].encode()
    assert list(find_secrets(text, "x")) == [(11, "github-token")]


def test_github_fine_grained_token_is_found():
    assert _kinds("github_" + "pat_" + "aB3_" * 8) == ["github-token"]


def test_openai_project_key_is_found():
    assert _kinds("sk-" + "proj-" + "aB3dE5fG_7hI9jK1lM3nO") == ["openai-style-key"]


@pytest.mark.parametrize("label", ["", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED ", "PGP "])
def test_private_key_of_any_label_is_found(label):
    block = " BLOCK" if label == "PGP " else ""
    text = f"-----BEGIN {label}PRIVATE KEY{block}-----\n" + _KEY_LINE
    assert _kinds(text) == ["private-key"]


def test_private_key_with_headers_is_found():
    text = "-----BEGIN RSA PRIVATE " + "KEY-----\nProc-Type: 4,ENCRYPTED\n"
    assert _kinds(text + "DEK-Info: AES-256-CBC,AB\n\n" + _KEY_LINE) == ["private-key"]


def test_private_key_inside_a_json_string_is_found():
    text = '{"private_key": "-----BEGIN PRIVATE ' + "KEY-----\\n" + _KEY_LINE.strip() + '"}'
    assert _kinds(text) == ["private-key"]


@pytest.mark.parametrize(
    "text",
    [
        "looks for '-----BEGIN PRIVATE KEY-----' in a file",
        "-----BEGIN PUBLIC KEY-----\n" + _KEY_LINE,
        "-----BEGIN CERTIFICATE-----\n" + _KEY_LINE,
        "task-" + "with-a-rather-long-name-in-kebab-case-2",
        "disk-" + "a" * 40,
        "self.hf_" + "model_name_or_path_for_loading_weights",
        "xAKIA" + "ABCDEFGH23456777",
        "Bearer " + "tokens-are-described-in-chapter-two",
        "AKIA and ASIA are prefixes",
    ],
)
def test_text_that_only_resembles_a_marked_secret_is_not_found(text):
    assert _kinds(text) == []


@pytest.mark.parametrize(
    "line",
    [
        'password = "{}"',
        "DB_PASSWORD='{}'",
        'api_key: str = "{}"',
        '"client_secret": "{}",',
        'os.environ["API_TOKEN"] = "{}"',
        'auth_token := "{}"',
        "aws_secret_access_key = '{}'",
        '$apiKey => "{}"',
    ],
)
def test_random_value_given_to_a_telling_name_is_found_in_code(line):
    assert _kinds(line.format("q8Zr2Lw9Xk4Vt7Nm")) == ["assigned-secret"]


def test_hash_of_a_given_tokenizer_in_the_shards_manifest_is_no_secret():
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    assert _kinds(f'"tokenizer_sha256":"{sha256}"') == []
    assert _kinds(f'"token":"{sha256}"') == ["assigned-secret"]


@pytest.mark.parametrize("path", [".env", "conf/app.yaml", "settings.ini", "run.sh", "Dockerfile"])
def test_random_value_without_quotes_is_found_in_configuration(path):
    assert _kinds("export API_KEY=q8Zr2Lw9Xk4Vt7Nm\n", path) == ["assigned-secret"]


def test_random_value_without_quotes_is_an_expression_in_code():
    assert _kinds("token = q8Zr2Lw9Xk4Vt7Nm\n", "x.py") == []


@pytest.mark.parametrize(
    "line",
    [
        'password = "correct horse battery staple"',
        'token = "end_of_text_token_name"',
        'secret = "${SECRET_FROM_ENV_2}"',
        'api_key = "<your-api-key-123abc>"',
        'password = "xxxxxxxxxxxxxxxx"',
        'token = "utf-8"',
        'password = getpass.getpass("Password for %s: ")',
        'tokenizer = "sentencepiece/spm_v32000.model"',
        'secret_name = "projects/demo/secrets/db/versions/2"',
        'special_tokens = ["<|endoftext|>", "<|im_start|>"]',
        'token_sha256 = ""',
    ],
)
def test_ordinary_value_given_to_a_telling_name_is_not_found(line):
    assert _kinds(line) == []


@given(st.integers(0, 10**9))
@settings(max_examples=50, deadline=None)
def test_random_base62_of_forty_looks_random(seed):
    rng = random.Random(seed)
    value = "".join(rng.choices(string.ascii_letters + string.digits, k=40))
    # Two draws in a million hold no digit or too few turns; none of fifty.
    assert looks_random(value.encode())


def test_long_hex_looks_random_whatever_its_order():
    assert looks_random(b"abcdef0123456789" * 2)


@pytest.mark.timeout(60)
def test_find_secrets_in_hostile_text_comes_back():
    # Backtracking without bound over these would take hours.
    hostile = b"-----BEGIN RSA PRIVATE KEY-----\n" + b"a: b a: b\n" * 3000
    hostile += b"!" + b"password" * 3000 + b"token = '" + b"a" * 20_000
    assert list(find_secrets(hostile, "x.py")) == []


@pytest.mark.parametrize(
    "path",
    [
        ".env", "app/.env.production", "id_rsa", "home/.ssh/id_ed25519", ".netrc", "_netrc",
        ".aws/credentials", "home/.AWS/Credentials", ".pypirc", ".git-credentials", "key.p12",
        "a/.cache/huggingface/token",
    ],
)  # fmt: skip
def test_secret_file_is_known_by_its_name(path):
    assert secret_file_kind(path) == "secret-file"


@pytest.mark.parametrize(
    "path",
    ["id_rsa.pub", ".env.example", "environment.py", "credentials.py", "aws/credentials.md", "env"],
)
def test_file_with_a_name_near_a_secret_ones_is_not_refused(path):
    assert secret_file_kind(path) is None
