"""Latency of networks of families: fitted to the profile's own, or from plain ViTs by a ratio."""

import math

import msgspec
import numpy as np
import pytest

from mdp.errors import InputError
from mdp.formats.plan import NetworkSpec
from mdp.formats.profile import DeviceProfile, NetworkPoint, Provenance, read_profile
from partitioner.assembly.members import network_estimate
from partitioner.estimates.catalogue import catalogue
from partitioner.estimates.latency import Way, fit_latency
from partitioner.estimates.latency_members import fit_members
from partitioner.estimates.latency_networks import (
    NetworkFit,
    fit_networks,
    ratio_ms,
    unmeasured_networks,
)
from partitioner.estimates.network_terms import NAMES, network_terms

MEASURED = (
    *(("mobilenetv4_conv_small", 128), ("mobilenetv4_conv_small", 224), ("hgnetv2_b0", 128)),
    *(("tf_efficientnet_lite0", 128), ("tf_efficientnet_lite0", 192), ("efficientnet_b0", 160)),
    *(("hgnetv2_b2", 192), ("repvit_m1_0", 160), ("levit_192", 224), ("efficientvit_b1", 160)),
    *(("fastvit_t8", 160), ("mobilenetv4_hybrid_medium", 192), ("mobilenetv3_large_100", 160)),
)
#: Milliseconds per unit of each term, of the size of a server core's.
TRUTH = dict.fromkeys(NAMES, 0.0) | {
    "operators": 0.006,
    "pointwise": 9e-9,
    "spatial": 9e-9,
    "depthwise": 2e-8,
    "other": 3e-8,
    "values": 1.5e-7,
    "gelu": 1.2e-6,
    "elementwise": 2.5e-7,
}
WAY = Way(threads=4)
OWN = Provenance(method="measured", source="a formula of this test")


def spec_of(name: str, image_size: int) -> NetworkSpec:
    return catalogue()[name].spec(image_size, 10)


def true_ms(name: str, image_size: int) -> float:
    counts = network_terms([spec_of(name, image_size)])[0]
    return float(counts @ np.array([TRUTH[term] for term in NAMES]))


def point(name: str, image_size: int, slower: float = 1.0) -> NetworkPoint:
    latency_ms = slower * true_ms(name, image_size)
    return NetworkPoint(name=name, image_size=image_size, threads=4, latency_ms=latency_ms)


def profile_with(points: list[NetworkPoint]) -> DeviceProfile:
    like = read_profile("n100")
    provenance = like.provenance | {"networks": OWN}
    return msgspec.structs.replace(like, networks=points, provenance=provenance)


PROBED = profile_with([point(*network) for network in MEASURED])


def fitted(profile: DeviceProfile) -> NetworkFit:
    found = fit_networks(profile, WAY)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "network", [("mobilenetv4_conv_small", 160), ("efficientnet_b0", 224), ("repvit_m0_9", 224)]
)
def test_the_fit_to_measured_networks_predicts_others(network: tuple[str, int]) -> None:
    found = fitted(PROBED).estimate(spec_of(*network))
    assert found is not None
    assert found.ms == pytest.approx(true_ms(*network), rel=0.1)
    assert found.low_ms < true_ms(*network) < found.high_ms


def test_a_family_that_is_slower_than_its_counts_keeps_its_factor() -> None:
    slow = [point(*n, slower=1.3 if n[0].startswith("hgnet") else 1.0) for n in MEASURED]
    plain, slowed = (fitted(profile_with(p)) for p in (list(PROBED.networks), slow))
    other = [spec_of("hgnetv2_b1", 160)]
    assert 1.15 < slowed.predict_many_ms(other)[0] / plain.predict_many_ms(other)[0] < 1.4


def test_a_family_that_was_not_measured_is_less_sure() -> None:
    model = fitted(PROBED)
    seen = model.estimate(spec_of("repvit_m0_9", 224))
    unseen = model.estimate(spec_of("caformer_s18", 224))
    assert seen is not None
    assert unseen is not None
    assert unseen.high_ms / unseen.ms > seen.high_ms / seen.ms


def test_a_few_measured_networks_tell_a_range_that_ends() -> None:
    few = profile_with([point(*network) for network in MEASURED[5:9]])
    found = fitted(few).estimate(spec_of("hgnetv2_b1", 160))
    assert found is not None
    assert found.high_ms < 10 * found.ms


def test_many_predictions_are_those_of_each_and_of_strangers_there_are_none() -> None:
    model = fitted(PROBED)
    stranger = NetworkSpec(name="net.onnx", image_size=128, parameters=1, macs=1)
    found = model.predict_many_ms([spec_of("repvit_m0_9", 224), stranger])
    known = model.estimate(spec_of("repvit_m0_9", 224))
    assert known is not None
    assert found[0] == known.ms
    assert math.isnan(found[1])
    assert model.estimate(stranger) is None
    whole = fit_members(PROBED, WAY)
    assert whole.estimate(spec_of("repvit_m0_9", 224), 10) == known
    with pytest.raises(InputError, match="is not known"):
        whole.predict_ms(stranger, 10)


def test_without_measured_networks_the_ratio_stands_in_and_says_so() -> None:
    profile = read_profile("n100")
    spec = spec_of("efficientnet_b0", 224)
    assert fit_networks(profile, WAY) is None
    found = fit_members(profile).estimate(spec, 10)
    assert "taken from another processor" in found.outside
    assert found.ms == ratio_ms(fit_latency(profile), spec)
    assert found.high_ms == 2 * found.ms
    other = read_profile("laptop-cpu")
    boards = [msgspec.structs.replace(profile, name=name) for name in ("n100-1", "n100-2")]
    (never,) = unmeasured_networks([PROBED, *boards, other])
    assert "measured in the profile of n100-1, n100-2, laptop-cpu (no probe" in never
    assert "mdp-agent probe --out n100-1.toml" in never


@pytest.mark.parametrize(
    ("stranger", "message"),
    [
        (("resnet_of_mine", 128), "expected a network of the catalogue, got 'resnet_of_mine'"),
        (("efficientnet_b0", 129), "efficientnet_b0: expected a picture size of .* px, got 129"),
    ],
)
def test_an_unknown_network_is_refused(stranger: tuple[str, int], message: str) -> None:
    strange = NetworkPoint(name=stranger[0], image_size=stranger[1], threads=4, latency_ms=1.0)
    with pytest.raises(InputError, match=rf"profile 'n100': `networks\[0\]`: {message}"):
        fit_networks(profile_with([strange, *PROBED.networks]), WAY)


def test_assembling_estimates_by_networks_measured_on_the_device() -> None:
    spec = spec_of("mobilenetv4_conv_small", 160)
    found = network_estimate(PROBED, spec, "onnxruntime")
    assert found == fitted(PROBED).estimate(spec)
    assert network_estimate(read_profile("n100"), spec, "onnxruntime") is None
    assert network_estimate(PROBED, spec, "openvino") is None
