"""Targets: the files that MDP reads, which others may have written or changed."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
from zmq.utils import z85

from mdp.errors import ConfigError
from mdp.files import Record, read_json
from mdp.formats.bundle import FUSION, MANIFEST, Bundle, Manifest
from mdp.formats.fleet import Fleet, agent_keys, new_fleet, plain_text_entries, read_fleet
from mdp.formats.keys import PUBLIC, SECRET, KeyFile, load_allowed, load_pair, load_public
from mdp.formats.plan import Assignment, Plan, Replica, read_plan
from mdp.formats.profile import DeviceProfile, contradictions, read_profile
from mdp.fusion.fuse import Contribution, FusionWeights, fuse, probabilities, rule_for, weights_for
from mdp.testing.bundles import DEVICES, write_bundle
from mdp.transport import public_key_of
from tests.fuzz.target import Structure, Target, refuse, scratch

JSON = Structure(parse=msgspec.json.decode, render=msgspec.json.encode)
TOML = Structure(parse=msgspec.toml.decode, render=msgspec.toml.encode)
#: Numbers, texts and nestings that readers have stumbled over.
ODD_JSON = (
    b"null", b"1e308", b"-0", b"0.1", b"9007199254740993", b'""', b'"\\u0000"', b'"\\ud800"',
    b'"\\n"', b"[]", b"{}", b"[[[[[[[[", b"true",
)  # fmt: skip
ODD_TOML = (
    b"nan", b"-inf", b"0x10", b"1e308", b"1979-05-27T07:32:00Z", b"'''", b'"\\u0000"', b'"\\n"',
    b"[[", b"]]", b"= {", b"a.b.c = 1\n", b"[[[[[[[[",
)  # fmt: skip


def words_of(kind: Any, form: str) -> tuple[bytes, ...]:
    """The names of all keys of a record and of the records in it, as they stand in a file."""
    names = sorted({name for record in _records(kind) for name in record.__struct_fields__})
    return tuple(form.format(name).encode() for name in names)


def _records(kind: Any) -> Iterable[type[Record]]:
    if isinstance(kind, type) and issubclass(kind, Record):
        yield kind
        for inner in get_type_hints(kind).values():
            yield from _records(inner)
    for inner in get_args(kind):
        yield from _records(inner)


def _one_line(texts: Iterable[str]) -> None:
    # Such names are printed, put into file names, and compared with others.
    for text in texts:
        assert text.isprintable(), f"a name that is not one line: {text!r}"


def _same(path: Path, content: bytes, again: Callable[[Path], object], found: object) -> None:
    path.write_bytes(content)
    assert again(path) == found, "another content once it was written and read"


@cache
def _bundle(name: str) -> Path:
    return write_bundle(scratch(name) / "bundle")


def read_manifest(data: bytes) -> bool:
    """A bundle with any manifest: opened, looked through, and its files asked for."""
    folder = _bundle("manifest")
    (folder / MANIFEST).write_bytes(data)
    try:
        bundle = Bundle.open(folder)
    except ConfigError as error:
        return refuse(error, folder / MANIFEST)
    manifest = bundle.manifest
    devices = [a.device for a in manifest.plan.assignments]
    _one_line([manifest.name, *devices])
    for k, device in enumerate(devices):
        assert bundle.assignment(device).k == k
    for rule in ("boosted", "stacked", "bagged"):
        accuracy = bundle.expected_accuracy(tuple(range(len(devices))), rule)
        assert accuracy is None or 0 <= accuracy <= 1
    for name in list(manifest.files)[:8]:
        try:
            assert bundle.verified(name).resolve().is_relative_to(folder.resolve())
        except ConfigError:
            continue
    again = msgspec.json.encode(manifest)
    _same(folder / MANIFEST, again, lambda path: read_json(path, Manifest), manifest)
    return True


def read_fusion(data: bytes) -> bool:
    """Any fusion weights: whatever they are, three finite contributions fuse to probabilities."""
    path = scratch("fusion") / FUSION
    path.write_bytes(data)
    try:
        weights = read_json(path, FusionWeights)
    except ConfigError as error:
        return refuse(error, path)
    # A bundle's weights have as many classes as it has labels, which a file holds one by one.
    logits = np.linspace(-9, 9, min(weights.num_classes, 10), dtype=np.float32)
    for subset in weights.subsets[:8]:
        if subset.bias and len(subset.bias) != len(logits):
            continue
        given = {k: Contribution(logits, -logits) for k in subset.members}
        for wanted in ("stacked", "boosted", "bagged"):
            rule = rule_for(subset.members, wanted, weights)
            fused = fuse(given, weights_for(subset.members, rule, weights))
            assert np.isfinite(probabilities(fused)).all()
    _same(path, msgspec.json.encode(weights), lambda path: read_json(path, FusionWeights), weights)
    return True


@cache
def _fleet_folder() -> Path:
    folder = scratch("fleet")
    write_bundle(folder / "bundle")
    for name, content in _key_files().items():
        (folder / f"client.{name}").write_bytes(content)
        (folder / f"client.{name}").chmod(0o600)
    return folder


def read_any_fleet(data: bytes) -> bool:
    """A fleet file, its bundle and its keys, as a client reads them before it dials."""
    folder = _fleet_folder()
    path = folder / "fleet.toml"
    path.write_bytes(data)
    try:
        fleet, _ = read_fleet(path)
        if fleet.key is not None:
            load_pair(folder / fleet.key, public_key_of)
        agent_keys(fleet, has_key=fleet.key is not None, insecure=False)
    except ConfigError as error:
        return refuse(error)
    assert not plain_text_entries(fleet)
    _one_line([text for entry in fleet.devices for text in (entry.device, entry.address)])
    assert sorted(fleet.members()) == sorted({entry.k for entry in fleet.devices})
    content = msgspec.toml.encode(_without_none(fleet))
    _same(path, content, lambda path: read_fleet(path)[0], fleet)
    return True


def _without_none(record: msgspec.Struct) -> Any:
    def keep(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: keep(item) for key, item in value.items() if item is not None}
        return [keep(item) for item in value] if isinstance(value, list) else value

    return keep(msgspec.to_builtins(record))


def read_any_plan(data: bytes) -> bool:
    """A plan, and every device's part of it."""
    path = scratch("plan") / "plan.toml"
    path.write_bytes(data)
    try:
        plan = read_plan(path)
    except ConfigError as error:
        return refuse(error, path)
    parts: list[Assignment | Replica] = [*plan.assignments, *plan.replicas]
    for part in parts:
        found = plan.assignment_of(part.device)
        assert found is not None
        assert (found.device, found.k) == (part.device, part.k)
        _one_line([part.device])
    _same(path, msgspec.toml.encode(_without_none(plan)), read_plan, plan)
    return True


def read_any_profile(data: bytes) -> bool:
    """A profile of the device that its file is named after."""
    path = scratch("profile") / "n100.toml"
    path.write_bytes(data)
    try:
        profile = read_profile(path)
    except ConfigError as error:
        return refuse(error, path)
    assert profile.name == "n100"
    assert contradictions(profile.latency, profile.provider) == []
    _same(path, msgspec.toml.encode(_without_none(profile)), read_profile, profile)
    return True


def read_keys(data: bytes) -> bool:
    """A key file, as either of the two that there are, and as one of a folder's."""
    folder = scratch("keys")
    accepted = False
    for ending in (SECRET, PUBLIC):
        path = folder / f"some{ending}"
        path.write_bytes(data)
        path.chmod(0o600)
        try:
            if ending == SECRET:
                pair = load_pair(path, public_key_of)
                assert pair.secret not in repr(pair)
                assert public_key_of(pair.secret) == pair.public
            else:
                assert set(load_allowed(folder)) == {load_public(path)}
            accepted = True
        except ConfigError as error:
            refuse(error, path)
    return accepted


def _key_files() -> dict[str, bytes]:
    secret = z85.encode(bytes(range(32))).decode()
    public = public_key_of(secret)
    pair = {"name": "client", "public": public}
    return {
        "secret": msgspec.toml.encode(pair | {"secret": secret}),
        "public": msgspec.toml.encode(pair),
    }


def _manifests() -> Mapping[str, bytes]:
    three = (_bundle("manifest-seed") / MANIFEST).read_bytes()
    whole = msgspec.json.decode(three)
    # The smaller the seed, the more of it a mutation meets.
    return {
        "three": msgspec.json.encode(whole),
        "unevaluated": msgspec.json.encode(whole | {"evaluation": None}),
    }


def _fusions() -> Mapping[str, bytes]:
    three = msgspec.json.decode((_bundle("fusion-seed") / FUSION).read_bytes())
    shared = {"size": 1, "a": [0.5, 0.5], "b": [1, 1]}
    return {
        "three": msgspec.json.encode(three),
        "shared": msgspec.json.encode(three | {"subsets": [], "by_size": [shared]}),
    }


def _fleets() -> Mapping[str, bytes]:
    folder = _fleet_folder()
    out = folder / "seed.toml"
    bundle = Bundle.open(folder / "bundle")
    new_fleet(bundle, [f"{d}=tcp://127.0.0.1:{n}" for n, d in enumerate(DEVICES, 7500)], out)
    plain = out.read_bytes()
    public = load_public(folder / "client.public")
    new_fleet(
        bundle,
        ["alpha=tcp://[::1]:7500", "alpha/attic=tcp://10.0.0.7:7500"],
        out,
        public_key=lambda device: public,
        key=folder / "client.secret",
    )
    return {"plain": plain, "keys": out.read_bytes()}


def _plans() -> Mapping[str, bytes]:
    plan = Bundle.open(_bundle("plan-seed")).manifest.plan
    few = msgspec.structs.replace(plan, assignments=plan.assignments[:2])
    return {"two": msgspec.toml.encode(_without_none(few))}


def _profiles() -> Mapping[str, bytes]:
    profile = read_profile("n100")
    few = msgspec.structs.replace(profile, latency=profile.latency[:3])
    return {"three-points": msgspec.toml.encode(_without_none(few))}


TARGETS = (
    Target(
        name="manifest",
        read=read_manifest,
        seeds=_manifests,
        share=0.05,
        max_bytes=8192,
        structure=JSON,
        words=(*ODD_JSON, *words_of(Manifest, '"{}":'), b"../", b"submodels/3/model.onnx"),
    ),
    Target(
        name="fusion",
        read=read_fusion,
        seeds=_fusions,
        share=0.05,
        structure=JSON,
        words=(*ODD_JSON, *words_of(FusionWeights, '"{}":')),
    ),
    Target(
        name="fleet",
        read=read_any_fleet,
        seeds=_fleets,
        share=0.015,
        max_bytes=2048,
        structure=TOML,
        words=(*ODD_TOML, *words_of(Fleet, "{} = "), b"tcp://", b"[::1]", b":65536", b"../"),
    ),
    Target(
        name="plan",
        read=read_any_plan,
        seeds=_plans,
        share=0.007,
        # Python reads whole numbers of 4,300 digits at most.
        max_bytes=6144,
        structure=TOML,
        words=(*ODD_TOML, *words_of(Plan, "{} = "), b"[[replicas]]\n"),
    ),
    Target(
        name="profile",
        read=read_any_profile,
        seeds=_profiles,
        share=0.006,
        structure=TOML,
        words=(*ODD_TOML, *words_of(DeviceProfile, "{} = "), b"[[latency]]\n"),
    ),
    Target(
        name="keys",
        read=read_keys,
        seeds=_key_files,
        share=0.012,
        # What `load_pair` reads at most, and one byte more.
        max_bytes=4097,
        structure=TOML,
        words=(*ODD_TOML, *words_of(KeyFile, "{} = ")),
    ),
)
