"""What a secret looks like: rules over bytes and file names, without any file access.

Two kinds of rule. A *marked* secret carries its issuer's prefix or frame (`ghp_`, a PEM
header) and is reported wherever it stands. An *assigned* secret is a random-looking
value given to a name like `password` or `api_key`; it is reported only when the value
mixes letters and digits as random text does, because source code is full of variables
called token.

Examples in documentation count as secrets: nobody can tell them from real ones, and an
allow-list says so in the open.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import PurePosixPath

_WORD_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Marked:
    """A secret known by its prefix."""

    kind: str
    prefix: bytes
    """Literal start; its cheap search decides whether the pattern runs at all."""
    rest: str
    """Pattern of what follows the prefix."""
    mixed: bool = False
    """True when the prefix is so short that the rest must look random."""


_MARKED = (
    # A header followed by key material: a mention of the header alone is no key.
    _Marked(
        kind="private-key",
        prefix=b"-----BEGIN ",
        rest=r"(?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:[\s\"'+,]|\\[rn])*(?:[A-Za-z-]+: [^\r\n\\]*(?:[\r\n]+|(?:\\[rn])+))*"
        r"[A-Za-z0-9+/=]{32}",
    ),
    _Marked(kind="private-key", prefix=b"PuTTY-User-Key-File-", rest=r"\d: "),
    _Marked(kind="private-key", prefix=b"AGE-SECRET-KEY-1", rest=r"[A-Z0-9]{50}"),
    *(
        _Marked(kind="aws-key-id", prefix=prefix, rest=r"[A-Z0-9]{16}(?![A-Za-z0-9])")
        for prefix in (b"AKIA", b"ASIA", b"ABIA", b"ACCA")
    ),
    _Marked(kind="gcp-api-key", prefix=b"AIza", rest=r"[A-Za-z0-9_-]{35}"),
    _Marked(kind="gcp-oauth-token", prefix=b"ya29.", rest=r"[A-Za-z0-9_-]{20}"),
    _Marked(kind="gcp-client-secret", prefix=b"GOCSPX-", rest=r"[A-Za-z0-9_-]{24}"),
    _Marked(kind="azure-account-key", prefix=b"AccountKey=", rest=r"[A-Za-z0-9+/]{40,88}={0,2}"),
    _Marked(kind="azure-access-key", prefix=b"SharedAccessKey=", rest=r"[A-Za-z0-9+/]{40,88}=?"),
    _Marked(kind="azure-sas-signature", prefix=b"sig=", rest=r"[A-Za-z0-9%+/]{40,}(?:%3[Dd]|=)"),
    *(
        _Marked(kind="github-token", prefix=prefix, rest=r"[A-Za-z0-9]{30}")
        for prefix in (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_")
    ),
    _Marked(kind="github-token", prefix=b"github_pat_", rest=r"[A-Za-z0-9_]{22}"),
    _Marked(kind="gitlab-token", prefix=b"glpat-", rest=r"[A-Za-z0-9_-]{20}"),
    _Marked(kind="huggingface-token", prefix=b"hf_", rest=r"[A-Za-z0-9]{30}"),
    _Marked(kind="openai-style-key", prefix=b"sk-", rest=r"[A-Za-z0-9]{32}"),
    _Marked(kind="openai-style-key", prefix=b"sk-", rest=r"[A-Za-z0-9_-]{24,200}", mixed=True),
    *(
        _Marked(kind="slack-token", prefix=prefix, rest=r"[A-Za-z0-9-]{10}")
        for prefix in (b"xoxa-", b"xoxb-", b"xoxe-", b"xoxo-", b"xoxp-", b"xoxr-", b"xoxs-")
    ),
    _Marked(kind="slack-webhook", prefix=b"hooks.slack.com/services/", rest=r"T\w+/B\w+/\w{16}"),
    _Marked(kind="stripe-key", prefix=b"sk_live_", rest=r"[A-Za-z0-9]{20}"),
    _Marked(kind="stripe-key", prefix=b"rk_live_", rest=r"[A-Za-z0-9]{20}"),
    _Marked(kind="package-index-token", prefix=b"npm_", rest=r"[A-Za-z0-9]{36}"),
    _Marked(kind="package-index-token", prefix=b"pypi-", rest=r"[A-Za-z0-9_-]{50}"),
    _Marked(kind="json-web-token", prefix=b"eyJ", rest=r"[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10}"),
    _Marked(kind="bearer-token", prefix=b"Bearer ", rest=r"[A-Za-z0-9._~+/-]{20,200}", mixed=True),
)
_PATTERNS = tuple(
    (rule, re.compile(re.escape(rule.prefix) + b"(" + rule.rest.encode() + b")"))
    for rule in _MARKED
)

_NAMES = (
    b"password", b"passwd", b"passphrase", b"secret", b"token", b"api_key", b"apikey", b"api-key",
    b"access_key", b"accesskey", b"access-key", b"auth_key", b"credential",
)  # fmt: skip
# From the name on: the rest of the identifier, a closing quote or bracket, an optional
# annotation, the sign of assignment, and then the value.
_TO_VALUE = (
    rb"[\w.-]{0,40}[\"']?\]?[ \t]{0,4}(?::[ \t]{0,4}[\w\[\]|., ]{1,40}=|=>|:=|=|:)[ \t]{0,4}"
)
_QUOTED = re.compile(_TO_VALUE + rb"[rbfuRBFU]{0,2}([\"'])([^\s\"'\\]{12,200})\1")
_UNQUOTED = re.compile(_TO_VALUE + rb"()([^\s\"'#;,]{12,200})[ \t]*(?:[\r\n#;]|$)")
_PLACEHOLDER = re.compile(
    rb"(?i)changeme|change_me|placeholder|dummy|your|redact|xxxx|\*\*\*|\.\.\."
    rb"|[<>{}()\[\]]|\$|%s"
)
_RUN = re.compile(rb"[A-Za-z0-9+=!@#%^&*~?]+")
_BASE64 = re.compile(rb"(?=.*[a-z])(?=.*[A-Z])(?=.*[0-9])[A-Za-z0-9+][A-Za-z0-9+/]{19,}={0,2}")
_HEX_KEY = re.compile(rb"[0-9a-fA-F]{32,}")
_CASES = bytes(
    1 if chr(code).islower() else 2 if chr(code).isupper() else 3 if chr(code).isdigit() else 0
    for code in range(256)
)
_TOKENIZER_FACT = re.compile(
    rb"izer_(?:sha256\"\s*:\s*\"[0-9a-f]{64}|class\"\s*:\s*\"[A-Za-z][A-Za-z0-9]{0,60}Tokenizer\w*)\""
)
"""What follows `token` where a file names its tokenizer: a public hash, or a class."""
_MIN_ENTROPY_BITS = 3.0  # per character; random hex of 16 characters has 3.3 on average
_MIN_TURNS_SHARE = 0.25  # of neighbours that differ in kind; random base62 has 0.6, hex 0.45

_SECRET_FILES = (
    ".env", ".env.*", "*.env", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", ".netrc", "_netrc",
    ".git-credentials", ".pgpass", ".htpasswd", ".pypirc", "*.p12", "*.pfx", "*.jks", "*.keystore",
    "*.kdbx", "*.ppk", "application_default_credentials.json",
)  # fmt: skip
_SECRET_PATHS = (".aws/credentials", ".kube/config", ".docker/config.json", "huggingface/token")
_HARMLESS_FILES = ("*.example", "*.sample", "*.template", "*.dist")
_CONFIG_SUFFIXES = frozenset(
    (".env", ".ini", ".cfg", ".conf", ".yaml", ".yml", ".toml", ".properties", ".sh", ".envrc", "")
)


def secret_file_kind(path: str) -> str | None:
    """Kind of secret a file holds by its name alone, or None."""
    name = path.rsplit("/", 1)[-1].lower()
    if any(fnmatchcase(name, pattern) for pattern in _HARMLESS_FILES):
        return None
    if any(fnmatchcase(name, pattern) for pattern in _SECRET_FILES):
        return "secret-file"
    if any(f"/{path.lower()}".endswith(f"/{known}") for known in _SECRET_PATHS):
        return "secret-file"
    return None


def find_secrets(data: bytes, path: str) -> Iterator[tuple[int, str]]:
    """Offset and kind of every secret in a text; *path* tells configuration from code."""
    for rule, pattern in _PATTERNS:
        if rule.prefix not in data:
            continue
        for match in pattern.finditer(data):
            sound = not rule.mixed or looks_random(match.group(1))
            if sound and _begins_a_word(data, match.start()):
                yield match.start(), rule.kind
    yield from _assigned(data, path)


def looks_random(value: bytes) -> bool:
    """True for text that mixes letters and digits the way generated secrets do."""
    if _PLACEHOLDER.search(value):
        return False
    # Base64 holds slashes; anything else with slashes is a path, judged by its longest part.
    joined = value.replace(b"/", b"") if _BASE64.fullmatch(value) else value
    run = max(_RUN.findall(joined), key=len, default=b"")
    if len(run) < 10:
        return False
    kinds = run.translate(_CASES)
    if 3 not in kinds or not {1, 2} & set(kinds):
        return False
    if _HEX_KEY.fullmatch(run):
        return True
    turns = sum(a != b for a, b in pairwise(kinds))
    return turns >= _MIN_TURNS_SHARE * (len(run) - 1) and _entropy(value) >= _MIN_ENTROPY_BITS


def _assigned(data: bytes, path: str) -> Iterator[tuple[int, str]]:
    pure = PurePosixPath(path.lower())
    is_config = pure.suffix in _CONFIG_SUFFIXES or ".env" in pure.name
    patterns = (_QUOTED, _UNQUOTED) if is_config else (_QUOTED,)
    lowered = data.lower()
    for name in _NAMES:
        at = lowered.find(name)
        while at >= 0:
            for pattern in patterns:
                match = pattern.match(data, at + len(name))
                harmless = _TOKENIZER_FACT.match(data, at + len(name))
                if match and not harmless and looks_random(match.group(2)):
                    yield at, "assigned-secret"
                    break
            at = lowered.find(name, at + len(name))


def _begins_a_word(data: bytes, at: int) -> bool:
    """False inside a longer identifier, where a prefix is chance."""
    if at == 0 or data[at] not in _WORD_BYTES or data[at - 1] not in _WORD_BYTES:
        return True
    # In quoted text a line break is written \n, and its n is no part of the word.
    return data[at - 1] in b"nrt" and data[at - 2 : at - 1] == b"\\"


def _entropy(value: bytes) -> float:
    """Bits per character, from the frequencies in the value itself."""
    counts = Counter(value).values()
    return -sum(count / len(value) * math.log2(count / len(value)) for count in counts)
