"""Recognition of secrets by name or value: they must not reach a command line, a file or a log."""

from __future__ import annotations

import math
import re
from collections import Counter

# Whole words of a name, between underscores: NCCL_IB_PKEY, UCX_TLS and TOKENIZERS_PARALLELISM hold none of them.
_WORDS = re.compile(
    r"(^|_)(APIKEY|AUTH|AUTHKEY|AUTHORIZATION|BASICAUTH|BEARER|CONNECTION_STRING|CONNSTR|COOKIE|CRED|CREDENTIAL|CREDFILE"
    r"|DBPASS|DSN|ENCRYPTIONKEY|HMAC|JWT|KEY|KEYFILE|KEYSTORE|KEYTAB|LICENSE|LOGIN|MASTERKEY|MFA|MNEMONIC|NETRC|OAUTH|OTP"
    r"|PASS|PASSCODE|PASSKEY|PASSPHRASE|PASSWD|PASSWORD|PAT|PEM|PIN|PRIVATE|PSK|PW|PWD|SALT|SAS|SECRET|SEED_PHRASE|SESSION"
    r"|SESSIONID|SIGNATURE|SIGNKEY|SSHKEY|SSHPASS|TOKEN|TOTP|USERPASS|USERPWD|WEBHOOK)S?(_|$)"
)
_PARTS = re.compile(r"TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|WEBHOOK")
_KNOWN = re.compile(
    r"(?<![A-Za-z0-9])(hf_|gh[opsru]_|github_pat_|gl(pat|rt|dt|cbt)-|npm_|pypi-|dckr_pat_|dop_v1_|lin_api_|nvapi-|r8_"
    r"|xox[abeprs]-|hv[sb]\.|ya29\.|AGE-SECRET-KEY-|[sr]k[-_])[A-Za-z0-9_-]{8,}"
    r"|\bSG\.[A-Za-z0-9_-]{10,}\.|\b(Basic|Bearer) [A-Za-z0-9+/=._-]{8,}"
    r"|\b(AKIA|ASIA)[A-Z0-9]{8,}|\bAIza[A-Za-z0-9_-]{20,}|\beyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]+"
    r"|-----BEGIN"
    # a user; Azure's addresses name the container there
    r"|((?<!abfs)(?<!az)://|(abfs|az)://(?![\w$-]+@[a-z0-9]+\.dfs\.core\.windows\.net(?![\w.@-])))"
    r"[^/\s]*@|[?&](sig|signature|token|key|password|X-Amz-Signature)="
    r"|\b(password|pwd|secret|token|(account|shared\w*|api)[ _-]?key)[\"']? ?[:=] ?[^\s;,]",
    re.IGNORECASE,
)
_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9+=_.-][A-Za-z0-9+/=_.-]{27,}")
_BITS = 3.3


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable is one that others should not read.

    Args:
        name: secret when one of its words says so (token, key, password, session, ...).
        value: secret when it has the form of a known token, a JWT, a key, a URL with a user or a signature in it; or
            when it is one word of 28 or more letters and digits with over 3.3 bits of entropy a character.
    """
    return says_secret(name) or has_secret(value) or _is_random(value.strip())


def says_secret(name: str) -> bool:
    """Return whether a word of a name says that it is the name of a secret."""
    upper = name.upper()
    return bool(_WORDS.search(upper) or _PARTS.search(upper))


def has_secret(value: str) -> bool:
    """Return whether a value has, or holds, the form of a known token, key or URL with a user or a signature."""
    return bool(_KNOWN.search(value))


def _is_random(text: str) -> bool:
    if len(text) > 4096 or not _RANDOM.fullmatch(text):
        return False
    counts = Counter(text).values()
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts) > _BITS
