"""Profiles: the shipped ones, and every way in which a file can be wrong."""

import re
from pathlib import Path

import pytest

from mdp.errors import ConfigError, InputError
from mdp.formats.profile import profiles_in_package, read_profile, read_profiles

NAMES = ("desktop-gpu", "jetson-orin-nano", "laptop-cpu", "n100", "raspberry-pi-5")


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_profile_reads_and_says_where_each_number_comes_from(name: str) -> None:
    assert tuple(profiles_in_package()) == NAMES
    profile = read_profile(name)
    assert profile.name == name
    on_processor = name in ("raspberry-pi-5", "n100", "laptop-cpu")
    assert (profile.provider == "CPUExecutionProvider") is on_processor
    assert 0.5 < profile.availability < 1
    assert {point.threads for point in profile.latency} >= {profile.threads}
    for number, provenance in profile.provenance.items():
        assert provenance.method == "estimated", number
        assert len(provenance.source) > 20, number


def test_the_laptop_s_latencies_admit_that_no_laptop_was_measured() -> None:
    source = read_profile("laptop-cpu").provenance["latency"].source
    assert "two virtual Zen 4 server cores" in source
    assert "onnxruntime 1." in source
    assert "unscaled as a stand-in" in source


def test_a_larger_shape_takes_longer_in_every_shipped_profile() -> None:
    for name in NAMES:
        points = [p for p in read_profile(name).latency if p.image_size >= 128]
        by_depth = sorted(
            (p.latency_ms, p.depth)
            for p in points
            if (p.image_size, p.embed_dim) == (128, 384) and p.threads == points[0].threads
        )
        assert [depth for _, depth in by_depth] == [4, 12], name


def write(folder: Path, old: str = "", new: str = "") -> Path:
    """The shipped n100 profile with one text replaced, as a file of its own."""
    text = profiles_in_package()["n100"].read_text()
    assert old in text
    path = folder / "n100.toml"
    path.write_text(text.replace(old, new, 1))
    return path


def test_a_profile_reads_from_any_folder(tmp_path: Path) -> None:
    assert read_profile(write(tmp_path)) == read_profile("n100")


def test_two_devices_of_one_name_are_refused(tmp_path: Path) -> None:
    """The second would replace the first without a word."""
    assert [one.name for one in read_profiles(["n100*2"])] == ["n100-1", "n100-2"]
    with pytest.raises(InputError, match=r"every profile once, got n100 .* \(n100\*2 for"):
        read_profiles(["n100", str(write(tmp_path))])


WRONG = {
    "wrong type": ("threads = 4\nmemory", 'threads = "4"\nmemory', r"`int`, got `str`.*\.threads"),
    "unknown key": ('kind = "cpu"', 'kind = "cpu"\ncolour = "red"', r"unknown field `colour`"),
    "unknown kind": ('kind = "cpu"', 'kind = "tpu"', r"'tpu'.*\.kind"),
    "negative memory": ("memory_bytes = ", "memory_bytes = -", r">= 1.*\.memory_bytes"),
    "no threads": ("threads = 4\nmemory", "threads = 0\nmemory", r">= 1.*\.threads"),
    "impossible availability": ("= 0.99", "= 1.5", r"<= 1.*\.availability"),
    "not a number": ("= 0.99", "= nan", r"availability|finite"),
    "infinite bandwidth": ("940_000_000.0", "inf", r"bandwidth_bps|finite"),
    "no link": ("940_000_000.0", "0.0", r"> 0.*\.link\.bandwidth_bps"),
    "a device of OpenVINO's as its own": ("CPUExecutionProvider", "GPU", r"regex.*\.provider"),
    "strange provider": ("CPUExecutionProvider", "cpu", r"regex.*\.provider"),
    "latency of nothing": ("latency_ms = 0.34", "latency_ms = 0", r"> 0.*\.latency\[0\]"),
    "misspelt latency key": ("depth = 2", "dept = 2", r"`dept`.*\.latency\[0\]"),
    "provenance missing": ("[provenance.link]", "[provenance.bonds]", r"`provenance` lacks link"),
    "hearsay": ('method = "estimated"', 'method = "heard"', r"'heard'.*\.provenance"),
    "provenance of no number": (
        "power_w = 12.0\n",
        "",
        r"`provenance` names power_w, no number of this file",
    ),
    "another name": ('name = "n100"', 'name = "shed"', r"`name`: expected 'n100'.*got 'shed'"),
    "not TOML": ("latency = [", "latency = [[[", r"n100\.toml: "),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_by_file_and_key(tmp_path: Path, case: str) -> None:
    old, new, expected = WRONG[case]
    path = write(tmp_path, old, new)
    with pytest.raises(ConfigError, match=expected) as caught:
        read_profile(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert caught.value.exit_code == 2


def test_a_number_s_source_cannot_be_empty(tmp_path: Path) -> None:
    path = write(tmp_path)
    head, _, _ = path.read_text().partition("[provenance.availability]")
    path.write_text(f'{head}[provenance.availability]\nmethod = "measured"\nsource = "?"\n')
    with pytest.raises(ConfigError, match=r"n100\.toml: .*length >= 8.*provenance"):
        read_profile(path)


def test_two_latency_points_are_too_few(tmp_path: Path) -> None:
    path = write(tmp_path)
    lines = path.read_text().splitlines()
    points = [line for line in lines if line.startswith("  {")]
    path.write_text("\n".join(line for line in lines if line not in points[2:]))
    with pytest.raises(ConfigError, match=r"length >= 3.*\.latency"):
        read_profile(path)


FIRST_POINT = (
    "  { image_size = 16, patch_size = 4, embed_dim = 64, depth = 2, num_heads = 2, "
    "mlp_ratio = 4.0, threads = 4, latency_ms = 0.34 },\n"
)


def with_point(folder: Path, **changes: object) -> Path:
    """The shipped n100 profile with its first point a second time, changed."""
    point = FIRST_POINT
    for key, value in changes.items():
        point, replaced = re.subn(rf"\b{key} = [^,}}]+", f"{key} = {value} ", point)
        if not replaced:
            point = point.replace(" }", f", {key} = {value} }}")
    return write(folder, FIRST_POINT, FIRST_POINT + point)


TWICE = r"contradicts itself: `latency\[\d\]` and `latency\[\d\]` measure the same enc"
DESCENDING = r"contradicts itself: `p10_ms` .* have to ascend.*`\$\.latency\[1\]`"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"latency_ms": 0.69}, TWICE),
        ({"latency_ms": 0.16}, TWICE),
        # Spelt out, the profile's own provider is the same.
        ({"latency_ms": 3.4, "provider": '"CPUExecutionProvider"'}, TWICE),
        ({"latency_ms": 0.16, "depth": 4}, r"are 2 and 4 deep and say 0\.34 and 0\.16 ms"),
        ({"p10_ms": 0.4}, DESCENDING),
        ({"p90_ms": 0.2}, DESCENDING),
        ({"p10_ms": 2, "p90_ms": 1}, DESCENDING),
    ],
)
def test_contradicting_points(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"n100\.toml: .*{expected}"):
        read_profile(with_point(tmp_path, **changes))


@pytest.mark.parametrize("latency_ms", [0.67, 0.18])
def test_one_encoder_measured_twice_may_spread(tmp_path: Path, latency_ms: float) -> None:
    assert len(read_profile(with_point(tmp_path, latency_ms=latency_ms)).latency) > 10


@pytest.mark.parametrize(
    "changes",
    [
        {"threads": 1},
        {"precision": '"int8"'},
        {"runtime": '"openvino"'},
        {"provider": '"CUDAExecutionProvider"'},
        {"batch": 8},
        {"mlp_ratio": 2.0},
    ],
)
def test_other_ways_are_no_contradiction(tmp_path: Path, changes: dict[str, object]) -> None:
    read_profile(with_point(tmp_path, latency_ms=3.4, **changes))


@pytest.mark.parametrize("provider", ["GPU", "GPU.1", "NPU"])
def test_devices_of_openvino_s_are_openvino_s_alone(tmp_path: Path, provider: str) -> None:
    named = {"provider": f'"{provider}"', "latency_ms": 3.4}
    points = read_profile(with_point(tmp_path, runtime='"openvino"', **named)).latency
    assert ("openvino", provider) in {(point.runtime, point.provider) for point in points}
    with pytest.raises(ConfigError, match=rf"`provider` {provider} is a device of OpenVINO's"):
        read_profile(with_point(tmp_path, **named))
    for unknown in ("AUTO", "HETERO:GPU,CPU", "GPU.", "openvino:GPU"):
        path = with_point(tmp_path, runtime='"openvino"', provider=f'"{unknown}"')
        with pytest.raises(ConfigError, match=r"regex.*\.latency\[\d\]\.provider"):
            read_profile(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "n100.toml").mkdir()
    for name, expected in (("gone", "No such file"), ("n100", "Is a directory")):
        with pytest.raises(ConfigError, match=rf"{name}\.toml: cannot be read: {expected}"):
            read_profile(tmp_path / f"{name}.toml")


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"neither a file nor a shipped profile.*laptop-cpu, n100"
    ):
        read_profile("n1000")


NETWORK = """
[[networks]]
name = "efficientnet_b0"
image_size = {size}
threads = 4
latency_ms = {ms}
"""


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            (160, 9.0),
            r"`networks\[0\]` and `networks\[1\]` measure the same network and say 4 and 9",
        ),
        ((224, 1.5), r"are efficientnet_b0 at 160 and 224 px and say 4 and 1\.5 ms"),
    ],
)
def test_contradicting_networks(tmp_path: Path, second: tuple[int, float], message: str) -> None:
    path = write(tmp_path)
    size, ms = second
    provenance = '[provenance.networks]\nmethod = "measured"\nsource = "a test of its own"\n'
    one, text = NETWORK.format(size=160, ms=4.0), path.read_text()
    path.write_text(text + one)
    with pytest.raises(ConfigError, match="`provenance` lacks networks"):
        read_profile(path)
    path.write_text(text + provenance + one + NETWORK.format(size=size, ms=ms))
    with pytest.raises(ConfigError, match=message):
        read_profile(path)
