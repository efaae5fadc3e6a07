"""Names of bundles in registries."""

import pytest

from mdp.errors import InputError
from mdp.registry.reference import Reference, is_reference, parse_reference

DIGEST = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("text", "host", "name", "tag", "digest"),
    [
        ("oci://h/n:1", "h", "n", "1", None),
        ("oci://registry.example:5000/a/b-c.d__e:v1.2_x", "registry.example:5000", "a/b-c.d__e",
         "v1.2_x", None),
        (f"oci://[::1]:5000/n@{DIGEST}", "[::1]:5000", "n", None, DIGEST),
        (f"oci://127.0.0.1/n:t@{DIGEST}", "127.0.0.1", "n", "t", DIGEST),
    ],
)  # fmt: skip
def test_references(text: str, host: str, name: str, tag: str | None, digest: str | None) -> None:
    assert parse_reference(text) == Reference(host=host, name=name, tag=tag, digest=digest)
    assert str(parse_reference(text)) == text


@pytest.mark.parametrize(
    "text",
    ["oci://", "oci://h", "oci://h/n", "oci://h/N:1", "oci://h/../n:1", "oci://h/n:1/x",
     "oci://user@h/n:1", "oci://h/n:", "oci://h/n@sha256:1", "oci://h/n:1?x=y", "oci://h/n:1\n",
     "oci://h:99999999/n:1", f"oci://h/n:{'x' * 129}"],
)  # fmt: skip
def test_what_is_no_reference(text: str) -> None:
    assert is_reference(text)
    with pytest.raises(InputError, match="expected oci://HOST/NAME:TAG or oci://HOST/NAME@sha256"):
        parse_reference(text)


def test_a_device_is_no_reference() -> None:
    assert not is_reference("n100")
