"""Pictures in multipart forms, of which no byte is looked at one by one."""

from email.message import EmailMessage
from typing import Any

import pytest

from mdp.gateway import bodies
from mdp.gateway.bodies import MAX_FIELDS, parse_upload
from mdp.gateway.refusals import Refusal

FORM = "multipart/form-data; boundary=a"
FILE = b'Content-Disposition: form-data; name="picture"; filename="a.png"'
TEXT = b'Content-Disposition: form-data; name="note"'


def form(*fields: tuple[bytes, bytes], boundary: bytes = b"a") -> bytearray:
    parts = [b"--" + boundary + b"\r\n" + head + b"\r\n\r\n" + body for head, body in fields]
    return bytearray(b"\r\n".join([*parts, b"--" + boundary + b"--\r\n"]))


class Counted(bytearray):
    """Counts how often it is asked for a byte or searched."""

    asked = 0

    def __getitem__(self, key: Any) -> Any:
        self.asked += 1
        return super().__getitem__(key)

    def find(self, *given: Any) -> int:
        self.asked += 1
        return super().find(*given)


@pytest.mark.parametrize(
    "content", [b"x", b"\r\n", b"\r\n--b\r\n", b"--a", b"\n--a", bytes(range(256)) * 9]
)
@pytest.mark.parametrize("others", [0, MAX_FIELDS - 1])
def test_the_one_file_of_a_form(content: bytes, others: int) -> None:
    notes = [(TEXT, b"note")] * others
    for fields in ([(FILE, content), *notes], [*notes, (FILE, content)]):
        assert bytes(parse_upload(FORM, form(*fields))) == content


def test_a_form_that_another_program_made() -> None:
    message = EmailMessage()
    message.set_type("multipart/form-data")
    for head in ('form-data; name="a; filename=x"', "FORM-DATA; name=b; FILENAME*=utf-8''%C3%A4"):
        field = EmailMessage()
        field["content-disposition"] = head
        field["Content-Type"] = "image/png"
        field.set_payload(head)
        message.attach(field)
    body = message.as_bytes().replace(b"\n", b"\r\n")
    at = body.index(b"\r\n\r\n--") + 4
    kind = f'Multipart/Form-Data; charset=utf-8; Boundary="{message.get_boundary()}"'
    assert bytes(parse_upload(kind, bytearray(body[at:]))).startswith(b"FORM-DATA; name=b")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "its boundary at the start"),
        (b"--b\r\n", "its boundary at the start"),
        (b"--a", "breaks off"),
        (b"--a\r\n" + FILE, "breaks off"),
        (form((FILE, b"x"))[:-8], "breaks off"),
        (form((FILE, b"x"))[:-4], "breaks off"),
        (b"--a--\r\n", "got none"),
        (b"--a x\r\n" + FILE + b"\r\n\r\nx\r\n--a--", "headers after its boundary"),
        (b"--ab\r\n" + FILE + b"\r\n\r\nx\r\n--a--", "headers after its boundary"),
        (b"--a\r\n" + FILE + b" " * 9999, "headers after its boundary"),
        (form((TEXT, b"x")), "got none"),
        (form((FILE, b"")), "got none"),
        (form((FILE, b"x"), (FILE, b"x")), "got several"),
        (form(*[(TEXT, b"x")] * (MAX_FIELDS + 1)), f"at most {MAX_FIELDS} fields"),
    ],
)
def test_forms_that_are_none(body: bytes, said: str) -> None:
    with pytest.raises(Refusal, match=said) as refused:
        parse_upload(FORM, bytearray(body))
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "; boundary=",
        f"; boundary={'x' * 71}",
        f"; x={'y' * 300}; boundary=a",
        "; boundary*=a''",
    ],
)
def test_boundaries_that_are_none(kind: str) -> None:
    with pytest.raises(Refusal, match="expected a boundary of 1 to 70 characters"):
        parse_upload(f"multipart/form-data{kind}", form((FILE, b"x")))


@pytest.mark.parametrize(
    "hostile", [b"\r\n--a-X", b"\r\n--a\r\n\r\n", b"\r\n--", b"\r\n\r\n", b"--a", b" ", b";", b'"']
)
@pytest.mark.parametrize("head", [b"--a", b"--a\r\n", b"--a\r\n" + FILE + b"\r\n\r\n"])
def test_a_large_form_costs_a_few_searches_whatever_is_in_it(hostile: bytes, head: bytes) -> None:
    times = 2**18 // len(hostile)
    body = Counted(head + hostile * times)
    with pytest.raises(Refusal):
        parse_upload(FORM, body)
    assert body.asked <= 4 * MAX_FIELDS, body.asked


def test_a_field_s_headers_are_short() -> None:
    # What Python's parser of headers takes grows with the square of their length.
    long = FILE + b"; " + b";" * bodies.MAX_FIELD_HEADER_BYTES
    with pytest.raises(Refusal, match="headers after its boundary"):
        parse_upload(FORM, form((long, b"x")))


@pytest.mark.parametrize("name", [b"filename*=\x00''a.png", b"filename*=no-such-set''a.png"])
def test_a_file_whose_name_has_no_character_set(name: bytes) -> None:
    """Names are not decoded: the standard library raises ValueError for the first one."""
    head = b'Content-Disposition: form-data; name="picture"; ' + name
    assert bytes(parse_upload(FORM, form((TEXT, b"1"), (head, b"content")))) == b"content"


def test_a_boundary_whose_name_has_no_character_set() -> None:
    kind = "multipart/form-data; boundary*=\x00''a"
    assert bytes(parse_upload(kind, form((FILE, b"content")))) == b"content"
