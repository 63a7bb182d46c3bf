"""Passwords in DSNs: found, and kept out of everything that is shown."""

import re
from urllib.parse import unquote

MASK = "***"
_SECRET = r"(?:\w*password|\w*secret|scram_\w+_key)"  # noqa: S105  the names of parameters
_SECRET_WORD = re.compile(rf"({_SECRET})\s*=\s*('(?:[^'\\]|\\.)*'?|(?:[^\s\\]|\\.)+)", re.IGNORECASE)
_SECRET_QUERY = re.compile(rf"([?&]{_SECRET})=([^&]*)", re.IGNORECASE)
_USER_PASSWORD = re.compile(r"(?<=://)([^:@/?]*):(.*)(?=@)", re.DOTALL)


def mask_dsn(dsn: str) -> str:
    """Return a DSN with its passwords replaced, in both forms; of a malformed one rather too much than too little."""
    if "://" not in dsn:
        return _SECRET_WORD.sub(rf"\1={MASK}", dsn)
    base, mark, query = dsn.partition("?")
    if "@" not in base and "@" in query:  # a password with an unescaped question mark
        base, mark, query = dsn, "", ""
    return _USER_PASSWORD.sub(rf"\1:{MASK}", base) + _SECRET_QUERY.sub(rf"\1={MASK}", mark + query)


def secrets_in(dsn: str) -> list[str]:
    """Return the passwords that a DSN holds, as written and as meant, so that messages can be rid of them."""
    found = [match[2] for pattern in (_SECRET_WORD, _SECRET_QUERY, _USER_PASSWORD) for match in pattern.finditer(dsn)]
    quoted = [word[1:-1] for word in found if word.startswith("'")]
    meant = [unquote(word) for word in found] + [re.sub(r"\\(.)", r"\1", word) for word in [*found, *quoted]]
    return sorted({word for word in [*found, *quoted, *meant] if word}, key=len, reverse=True)
