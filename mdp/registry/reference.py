"""Names of bundles in registries: oci://HOST/NAME:TAG, oci://HOST/NAME@sha256:..."""

import re
from dataclasses import dataclass
from typing import Final

from mdp.errors import InputError

SCHEME: Final = "oci://"
#: As the OCI distribution specification 1.1 has them.
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?"
_REFERENCE = re.compile(
    rf"oci://(?P<host>{_HOST})/(?P<name>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A bundle in a registry; the digest, where there is one, decides, and not the tag."""

    #: With the port, where one is named.
    host: str
    name: str
    tag: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.repository}{tag}{f'@{self.digest}' if self.digest else ''}"

    @property
    def repository(self) -> str:
        """The place of all versions."""
        return f"{SCHEME}{self.host}/{self.name}"


def is_reference(text: str) -> bool:
    """Tell whether `text` is meant as one, right or wrong."""
    return text.startswith(SCHEME)


def parse_reference(text: str) -> Reference:
    """The reference that `text` is; raises InputError unless it names a tag or digest."""
    found = _REFERENCE.fullmatch(text)
    if found is None or not (found["tag"] or found["digest"]):
        raise InputError(
            f"{text}: expected oci://HOST/NAME:TAG or oci://HOST/NAME@sha256:DIGEST, the name in "
            "lower case"
        )
    return Reference(**found.groupdict())
